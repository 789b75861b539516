"""Mixtral."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import LONG, Family, MoeKeys

FAMILIES = (
    Family(
        "mixtral",
        "Mixtral",
        rows.COMMON + rows.experts("block_sparse_moe", "w1", "w3", "w2"),
        models="Mixtral",
        moe=MoeKeys("num_local_experts", "intermediate_size"),
        windows="every",
        defaults=(LONG, ("rope_theta", 1e6), ("rms_norm_eps", 1e-5)),
        served_by=("vllm",),
    ),
)
