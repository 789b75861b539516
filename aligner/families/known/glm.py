"""GLM-4, and GLM-4-0414, which normalises before and behind attention and the MLP."""

from __future__ import annotations

from typing import Any

from aligner.families import rows
from aligner.families.family import FUSED_MLP, LONG, Family

_BOTH: dict[str, Any] = {
    "keys": (("qkv_bias", "attention_bias", True),),
    "fused": (FUSED_MLP,),
    "interleaved_rotary": True,
    "default_rotary_fraction": 0.5,
    "default_head_dim": 128,
    "defaults": (LONG, ("rms_norm_eps", 1.5625e-7)),
}
_NORMS = rows.norms(
    before="input_layernorm",
    before_mlp="post_attention_layernorm",
    behind="post_self_attn_layernorm",
    behind_mlp="post_mlp_layernorm",
)
FAMILIES = (
    Family(
        "glm",
        "Glm",
        rows.COMMON + rows.MLP + rows.QKV_BIAS,
        models="GLM-4, dense",
        **_BOTH,
        vllm_refused="vLLM's class takes no single matrices in a refit.",
    ),
    Family("glm4", "Glm4", _NORMS + rows.MLP + rows.QKV_BIAS, models="GLM-4-0414, dense", **_BOTH, served_by=("vllm",)),
)
