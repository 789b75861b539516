"""Llama (1 to 3.2), and Mistral, which has windows, and no biases."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import BIAS_KEYS, LONG, Family

FAMILIES = (
    Family(
        "llama",
        "Llama",
        rows.COMMON + rows.MLP + rows.BIASES + rows.MLP_BIASES,
        keys=BIAS_KEYS,
        defaults=(("max_position_embeddings", 2048),),
        served_by=("vllm", "trtllm_engine"),
    ),
    Family(
        "mistral",
        "Mistral",
        rows.COMMON + rows.MLP,
        windows="every",
        default_window=4096,
        defaults=(LONG,),
        served_by=("vllm", "trtllm_engine"),
    ),
)
