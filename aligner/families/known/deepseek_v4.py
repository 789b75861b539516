"""DeepSeek-V4: several residual streams, attention to a window and to entries of several tokens, experts by token id
in the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aligner.families import rows
from aligner.families.family import Family, MoeKeys


def _streams(ours: str, hf: str) -> tuple[rows.ParamSpec, ...]:
    shapes = {"fn": "streams_numbers streams_hidden", "base": "streams_numbers", "scale": "3"}
    return tuple(rows.layer(f"{ours}_streams.{x}", f"hc_{hf}_{x}", shape, float32=True) for x, shape in shapes.items())


def _attention(ours: str, hf: str, shape: str, *where: Any, **fields: Any) -> rows.ParamSpec:
    return rows.layer(f"self_attention.{ours}", f"attn.{hf}", shape, *where, **fields)


def _compressor(ours: str, hf: str, width: str, entry: str, norm: str, **fields: Any) -> tuple[rows.ParamSpec, ...]:
    names = f"{ours}.", f"{hf}."
    return (
        _attention(f"{names[0]}linear_kv.weight", f"{names[1]}wkv.weight", f"{width} hidden", **fields),
        _attention(f"{names[0]}linear_gate.weight", f"{names[1]}wgate.weight", f"{width} hidden", **fields),
        _attention(f"{names[0]}position_bias", f"{names[1]}ape", f"{entry} {width}", float32=True, **fields),
        _attention(f"{names[0]}norm.weight", f"{names[1]}norm.weight", norm, **fields),
    )


_CHOICE = {"kind": "indexer", "frozen": True}
_SHARED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _renamed(name: str) -> str:
    block, _, end = name.rpartition(".weight")[0].rpartition(".")
    return f"{block}.{_SHARED[end]}.weight"


_TABLE = (
    rows.COMMON[0],
    rows.layer("input_layernorm.weight", "attn_norm.weight", "hidden"),
    _attention("linear_q_down_proj.weight", "wq_a.weight", "q_rank hidden"),
    _attention("q_layernorm.weight", "q_norm.weight", "q_rank"),
    _attention("linear_q_up_proj.weight", "wq_b.weight", "q q_rank", 0, "heads"),
    _attention("linear_kv_proj.weight", "wkv.weight", "head hidden"),
    _attention("kv_norm.weight", "norm.weight", "head"),
    _attention("sinks.weight", "attn_sink", "heads", 0, "heads"),
    _attention("linear_o_down_proj.weight", "wo_a.weight", "o_ranks o_group", 0, "o_groups"),
    _attention("linear_proj.weight", "wo_b.weight", "hidden o_ranks", 1, "o_groups"),
    *_compressor("compressor", "compressor", "2head", "entry", "head", kind="indexer"),
    *_compressor("compressor", "compressor", "head", "heavy_entry", "head", kind="heavy"),
    *_compressor("indexer.compressor", "indexer.compressor", "2index_head", "entry", "index_head", **_CHOICE),
    _attention("indexer.linear_wq_b.weight", "indexer.wq_b.weight", "index_q q_rank", **_CHOICE),
    _attention("indexer.linear_weights_proj.weight", "indexer.weights_proj.weight", "index_heads hidden", **_CHOICE),
    rows.layer("pre_mlp_layernorm.weight", "ffn_norm.weight", "hidden"),
    *rows.experts("ffn", "w1", "w3", "w2"),
    *(replace(row, hf=tuple(map(_renamed, row.hf))) for row in rows.shared_expert("ffn", "shared_experts")),
    rows.layer("mlp.router.expert_bias", "ffn.gate.bias", "experts", float32=True, kind="scored"),
    rows.layer("mlp.router.table", "ffn.gate.tid2eid", "vocab top_k", integer=True, kind="hashed", frozen=True),
    *_streams("attention", "attn"),
    *_streams("mlp", "ffn"),
    rows.COMMON[-1],
    *(
        rows.ParamSpec(f"decoder.final_layernorm.{x}", (f"model.hc_head.hc_{x}",), "copy", None, shape, float32=True)
        for x, shape in (("fn", ("streams", "streams_hidden")), ("base", ("streams",)), ("scale", ("1",)))
    ),
)
FAMILIES = (
    Family(
        "deepseek_v4",
        "DeepseekV4",
        _TABLE,
        models="DeepSeek-V4 Flash and Pro",
        moe=MoeKeys("n_routed_experts", "moe_intermediate_size", aux_coef="", shared="n_shared_experts"),
        keys=(
            ("latent.query_rank", "q_lora_rank", 1024),
            ("latent.output_groups", "o_groups", 8),
            ("latent.output_rank", "o_lora_rank", 1024),
            ("indexer.heads", "index_n_heads", 64),
            ("indexer.head_dim", "index_head_dim", 128),
            ("indexer.top_k", "index_topk", 512),
            ("entries.tokens", "compress_rate_csa", 4),
            ("entries.heavy_tokens", "compress_rate_hca", 128),
            ("hyper.streams", "hc_mult", 4),
            ("hyper.iterations", "hc_sinkhorn_iters", 20),
            ("hyper.eps", "hc_eps", 1e-6),
            ("moe.scale", "routed_scaling_factor", 1.5),
            ("moe.hash_layers", "num_hash_layers", 3),
            ("moe.gate_limit", "swiglu_limit", 10.0),
        ),
        constants=(("scoring_func", "sqrtsoftplus"), ("norm_topk_prob", True), ("n_shared_experts", 1)),
        predicts_ahead="num_nextn_predict_layers",
        default_head_dim=512,
        default_rotary_fraction=1 / 8,
        windows="layers",
        default_window=128,
        default_global=("sliding_window_pattern", 2),
        default_local_base=1e4,
        defaults=(("max_position_embeddings", 1 << 20),),
        sizes=(("num_key_value_heads", 1), ("n_shared_experts", 1)),
        stored=(("lm_head.", "head."),),
        published=(
            (".attn.kv_norm.", ".attn.norm."),
            ("layers.", "model.layers."),
            ("embed.", "model.embed_tokens."),
            ("norm.", "model.norm."),
            ("hc_head_", "model.hc_head.hc_"),
        ),
        root_scores=True,
        vllm_refused="A refit of vLLM's class loses sinks and fails at sums over streams; no CPU build generates.",
    ),
)
