"""Qwen3-Next: three of four layers have linear attention."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import DELTA_NET_KEYS, Family, MoeKeys

FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3Next",
        rows.in_attention_layers(rows.COMMON + rows.QK_NORM)
        + rows.delta_net("qkvz", "ba")
        + rows.MLP
        + rows.experts("mlp", "gate_proj", "up_proj", "down_proj")
        + rows.shared_expert("mlp", "shared_expert", "shared_expert_gate"),
        models="Qwen3-Next",
        moe=MoeKeys("num_experts", "moe_intermediate_size", "norm_topk_prob", dense_layers="mlp_only_layers"),
        keys=(
            ("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
            *DELTA_NET_KEYS,
        ),
        constants=(("decoder_sparse_step", 1),),
        default_head_dim=256,
        default_rotary_fraction=0.25,
        default_attention_every=4,
        offset_norms=True,
        gated_attention=True,
        served_by=("vllm",),
        vllm_fixed=(("tie_embeddings", False),),
    ),
)
