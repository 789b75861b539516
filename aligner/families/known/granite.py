"""Granite 3 (dense)."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import BIAS_KEYS, Family

FAMILIES = (
    Family(
        "granite",
        "Granite",
        rows.COMMON + rows.MLP + rows.BIASES + rows.MLP_BIASES,
        models="Granite 3, dense",
        keys=(
            *BIAS_KEYS,
            ("attention.multiplier", "attention_multiplier", 1.0),
            ("scales.embedding", "embedding_multiplier", 1.0),
            ("scales.residual", "residual_multiplier", 1.0),
            ("scales.logits", "logits_scaling", 1.0),
        ),
        defaults=(("max_position_embeddings", 2048),),
        served_by=("vllm",),
    ),
)
