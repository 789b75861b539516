"""OLMo 2 and 3: norms behind attention and the MLP alone, and over all heads of a token's queries and keys."""

from __future__ import annotations

from typing import Any

from aligner.families import rows
from aligner.families.family import ATTENTION_BIAS, Family

_DEFAULTS = ("max_position_embeddings", 2048), ("rms_norm_eps", 1e-5)
_BOTH: dict[str, Any] = {
    "table": rows.norms(behind="post_attention_layernorm", behind_mlp="post_feedforward_layernorm")
    + rows.MLP
    + rows.WIDE_QK_NORM
    + rows.BIASES,
    "keys": (ATTENTION_BIAS,),
    "served_by": ("vllm",),
}
FAMILIES = (
    Family("olmo2", "Olmo2", models="OLMo 2", **_BOTH, defaults=_DEFAULTS),
    Family(
        "olmo3",
        "Olmo3",
        models="OLMo 3",
        **_BOTH,
        windows="layers",
        default_window=4096,
        default_global=("sliding_window_pattern", 4),
        default_local_base=5e5,
        defaults=(*_DEFAULTS, ("rope_theta", 5e5)),
    ),
)
