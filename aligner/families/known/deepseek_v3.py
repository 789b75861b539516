"""DeepSeek-V3 and R1: latent attention, and experts chosen by groups. GLM-4.7-Flash is alike; V3.2
and GLM-5 add an indexer."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import Family, Key, MoeKeys

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
NEIGHBOURS: Key = ("latent.neighbours", "rope_interleave", True)
CONSTANTS = (("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))


def _sizes(query_rank: int, plain_dim: int, value_dim: int) -> tuple[Key, ...]:
    return (
        ("latent.kv_rank", "kv_lora_rank", 512),
        ("latent.query_rank", "q_lora_rank", query_rank),
        ("latent.plain_dim", "qk_nope_head_dim", plain_dim),
        ("latent.rotary_dim", "qk_rope_head_dim", 64),
        ("latent.value_dim", "v_head_dim", value_dim),
    )


def _groups(count: int, used: int, scale: float = 2.5) -> tuple[Key, ...]:
    return (
        ("moe.groups", "n_group", count),
        ("moe.top_groups", "topk_group", used),
        ("moe.scale", "routed_scaling_factor", scale),
    )


def _indexer(heads: int) -> tuple[Key, ...]:
    return (
        ("indexer.heads", "index_n_heads", heads),
        ("indexer.head_dim", "index_head_dim", 128),
        ("indexer.top_k", "index_topk", 2048),
    )


FAMILIES = (
    Family(
        "deepseek_v3",
        "DeepseekV3",
        rows.LATENT + EXPERTS,
        also=("kimi_k2",),
        models="DeepSeek-V3, R1, Moonlight, Kimi-K2",
        moe=MOE,
        keys=(*_sizes(1536, 128, 128), NEIGHBOURS, *_groups(8, 4)),
        constants=CONSTANTS,
        predicts_ahead="num_nextn_predict_layers",
        defaults=(("max_position_embeddings", 4096),),
        served_by=("vllm",),
        vllm_fixed=(("tie_embeddings", False), ("latent.neighbours", True)),
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLite",
        rows.LATENT + EXPERTS,
        models="GLM-4.7-Flash",
        moe=MOE,
        keys=(*_sizes(768, 192, 256), NEIGHBOURS, *_groups(1, 1, 1.8)),
        constants=CONSTANTS,
        predicts_ahead="num_nextn_predict_layers",
        defaults=(("max_position_embeddings", 202752), ("rms_norm_eps", 1e-5)),
        sizes=(("first_k_dense_replace", 1),),
        lists_dense=True,
        served_by=("vllm",),
        vllm_fixed=(("tie_embeddings", False), ("latent.neighbours", True)),
    ),
    Family(
        "deepseek_v32",
        "DeepseekV32",
        rows.INDEXED + EXPERTS,
        models="DeepSeek-V3.2",
        moe=MOE,
        keys=(*_sizes(1536, 128, 128), *_groups(8, 4), *_indexer(64)),
        constants=(*CONSTANTS, ("rope_interleave", True), ("indexer_rope_interleave", False)),
        predicts_ahead="num_nextn_predict_layers",
        defaults=(("max_position_embeddings", 163840),),
        lists_dense=True,
        served_by=("vllm",),
        vllm_fixed=(("tie_embeddings", False),),
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsa",
        rows.INDEXED + EXPERTS,
        models="GLM-5 to 5.3",
        moe=MOE,
        keys=(*_sizes(2048, 192, 256), *_groups(1, 1), *_indexer(32)),
        constants=(*CONSTANTS, ("rope_interleave", True), ("indexer_rope_interleave", True)),
        indexer_neighbours=True,
        shares_indexer=True,
        predicts_ahead="num_nextn_predict_layers",
        defaults=(("max_position_embeddings", 202752), ("rms_norm_eps", 1e-5)),
        lists_dense=True,
        served_by=("vllm",),
        vllm_fixed=(("tie_embeddings", False),),
    ),
)
