"""Phi-3 and Phi-4 (but the multimodal ones)."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import FUSED_MLP, FUSED_QKV, Family

FAMILIES = (
    Family(
        "phi3",
        "Phi3",
        rows.COMMON + rows.MLP,
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        fused=(FUSED_QKV, FUSED_MLP),
        windows="every",
        default_rotary_fraction=1.0,
        defaults=(("max_position_embeddings", 4096), ("rms_norm_eps", 1e-5)),
        served_by=("vllm",),
    ),
)
