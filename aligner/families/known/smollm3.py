"""SmolLM3: every fourth layer sees no positions."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import BIAS_KEYS, TIED, Family

FAMILIES = (
    Family(
        "smollm3",
        "SmolLM3",
        rows.COMMON + rows.MLP + rows.BIASES + rows.MLP_BIASES,
        models="SmolLM3",
        keys=BIAS_KEYS,
        windows="layers",
        window_switch=True,
        default_global=("no_rope_layers", 0),
        nope_every=4,
        defaults=(TIED, ("rope_theta", 2e6)),
        served_by=("vllm",),
    ),
)
