"""Llama (1 to 3.2), and Mistral, which has windows, and no biases."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import BIAS_KEYS, LONG, Family

FAMILIES = (
    Family(
        "llama",
        "Llama",
        rows.COMMON + rows.MLP + rows.BIASES + rows.MLP_BIASES,
        models="Llama 2, 3, 3.1 and later, and others of that shape",
        keys=BIAS_KEYS,
        defaults=(("max_position_embeddings", 2048),),
        served_by=("vllm", "trtllm_engine"),
    ),
    Family(
        "mistral",
        "Mistral",
        rows.COMMON + rows.MLP,
        models="Mistral 7B and other dense ones, Mistral Small 3.1 and 3.2",
        within=("mistral3", "language_model.model."),
        windows="every",
        default_window=4096,
        defaults=(LONG,),
        served_by=("vllm", "trtllm_engine"),
    ),
)
