"""Ministral 3 and Devstral 2: Mistral with YaRN, and queries that grow with their positions."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import Family

FAMILIES = (
    Family(
        "ministral3",
        "Ministral3",
        rows.COMMON + rows.MLP,
        models="Ministral 3, Devstral 2",
        within=("mistral3", "language_model.model."),
        windows="every",
        default_head_dim=128,
        defaults=(("max_position_embeddings", 262144), ("rope_theta", 1e6), ("rms_norm_eps", 1e-5)),
        default_rope=(
            ("rope_type", "yarn"),
            ("factor", 16.0),
            ("original_max_position_embeddings", 16384),
            ("mscale", 1.0),
            ("mscale_all_dim", 1.0),
            ("llama_4_scaling_beta", 0.1),
        ),
        scaled_queries=True,
        served_by=("vllm",),
    ),
)
