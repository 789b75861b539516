"""DeepSeek-V3 and R1: latent attention, and experts chosen by groups."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import Family, MoeKeys

EXPERTS = (
    *rows.MLP,
    *rows.experts("mlp", "gate_proj", "up_proj", "down_proj"),
    *rows.sigmoid_router("mlp", "shared_experts"),
)
MOE = MoeKeys(
    "n_routed_experts",
    "moe_intermediate_size",
    "norm_topk_prob",
    aux_coef="",
    first_dense="first_k_dense_replace",
    shared="n_shared_experts",
)
FAMILIES = (
    Family(
        "deepseek_v3",
        "DeepseekV3",
        rows.LATENT + EXPERTS,
        also=("kimi_k2",),
        models="DeepSeek-V3, R1, Moonlight, Kimi-K2",
        moe=MOE,
        keys=(
            ("latent.kv_rank", "kv_lora_rank", 512),
            ("latent.query_rank", "q_lora_rank", 1536),
            ("latent.plain_dim", "qk_nope_head_dim", 128),
            ("latent.rotary_dim", "qk_rope_head_dim", 64),
            ("latent.value_dim", "v_head_dim", 128),
            ("latent.neighbours", "rope_interleave", True),
            ("moe.groups", "n_group", 8),
            ("moe.top_groups", "topk_group", 4),
            ("moe.scale", "routed_scaling_factor", 2.5),
        ),
        constants=(("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
        predicts_ahead="num_nextn_predict_layers",
        defaults=(("max_position_embeddings", 4096),),
    ),
)
