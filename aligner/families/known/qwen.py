"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from aligner.families import rows
from aligner.families.family import ATTENTION_BIAS, Family, MoeKeys

_WINDOWS: dict[str, Any] = {"window_switch": True, "default_window": 4096}
_LAYERS = _WINDOWS | {"windows": "layers", "default_global": ("max_window_layers", 28)}
FAMILIES = (
    Family(
        "qwen2",
        "Qwen2",
        rows.COMMON + rows.MLP + rows.QKV_BIAS,
        models="Qwen2, Qwen2.5",
        **_LAYERS,
        served_by=("vllm", "trtllm_engine"),
        vllm_divides_hidden=True,
    ),
    Family(
        "qwen3",
        "Qwen3",
        rows.COMMON + rows.MLP + rows.QK_NORM + rows.BIASES,
        models="Qwen3, dense",
        keys=(ATTENTION_BIAS,),
        default_head_dim=128,
        **_LAYERS,
        served_by=("vllm", "trtllm_engine"),
    ),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        rows.COMMON + rows.MLP + rows.experts("mlp", "gate_proj", "up_proj", "down_proj") + rows.QK_NORM + rows.BIASES,
        models="Qwen3-MoE",
        moe=MoeKeys("num_experts", "moe_intermediate_size", "norm_topk_prob", dense_layers="mlp_only_layers"),
        keys=(ATTENTION_BIAS,),
        windows="every",
        **_WINDOWS,
        constants=(("decoder_sparse_step", 1),),
        served_by=("vllm",),
    ),
)
