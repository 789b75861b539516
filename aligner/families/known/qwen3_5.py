"""The language models of Qwen3.5, Qwen3.6 and Qwen3.8, dense and with experts: Qwen3-Next's layers."""

from __future__ import annotations

from typing import Any

from aligner.families import rows
from aligner.families.family import DELTA_NET_KEYS, Family, MoeKeys

_PARTS = tuple(f"linear_attn.in_proj_{name}" for name in "qkv")
_LAYERS = rows.in_attention_layers(rows.COMMON + rows.QK_NORM) + rows.delta_net("q", "k", "v", "z", "b", "a")
_BOTH: dict[str, Any] = {
    "constants": (("attn_output_gate", True), ("mamba_ssm_dtype", "float32")),  # of the states in engines
    "default_head_dim": 256,
    "default_rotary_fraction": 0.25,
    "default_attention_every": 4,
    "offset_norms": True,
    "gated_attention": True,
    "served_by": ("vllm",),
    "predicts_ahead": "mtp_num_hidden_layers",
    "fused": (("linear_attn.in_proj_qkv", _PARTS),),
}
FAMILIES = (
    Family(
        "qwen3_5_text",
        "Qwen3_5",
        _LAYERS + rows.MLP,
        models="Qwen3.5, 3.6 and 3.8, dense",
        within=("qwen3_5", "model.language_model."),
        keys=DELTA_NET_KEYS,
        score_architecture="Qwen3_5Text",
        **_BOTH,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        _LAYERS
        + rows.experts("mlp", "gate_proj", "up_proj", "down_proj")
        + rows.shared_expert("mlp", "shared_expert", "shared_expert_gate"),
        models="Qwen3.5, 3.6 and 3.8 with experts",
        within=("qwen3_5_moe", "model.language_model."),
        moe=MoeKeys("num_experts", "moe_intermediate_size"),
        keys=(("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512), *DELTA_NET_KEYS),
        experts_stacked=True,
        **_BOTH,
    ),
)
