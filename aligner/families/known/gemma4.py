"""Gemma 4's language models: global layers have heads of their own, whose values may be their keys. In some, experts
stand beside each layer's MLP, both between norms of their own. In others, each token gives each layer an input of its
own, and the last layers use the keys and values of layers before."""

from __future__ import annotations

from dataclasses import replace

from aligner.families import rows
from aligner.families.family import LONG, TIED, Family, MoeKeys
from aligner.families.known.gemma import NORMS

_OTHERS = tuple(
    replace(row, kind="dense") if "pre_mlp" in row.canonical else row
    for row in NORMS
    if "linear_qkv" not in row.canonical
)
_AROUND = (
    "router.scale",
    "pre_feedforward_layernorm_2.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm_2.weight",
    "post_feedforward_layernorm_1.weight",
)
_EXPERTS = (
    *(
        replace(row, hf=tuple(name.replace(".mlp.", ".") for name in row.hf))
        for row in rows.experts("mlp", "gate_proj", "up_proj", "down_proj", "router.proj")
    ),
    rows.layer("mlp.router.expert_scale", "router.per_expert_scale", "experts", kind="sparse"),
    *(
        replace(row, canonical=row.canonical.replace(".mlp.", ".mlp.shared_experts."), kind="sparse")
        for row in rows.MLP
    ),
    *(
        rows.layer(f"mlp.{ours}.weight", hf, "hidden", kind="sparse")
        for ours, hf in zip(rows.BRANCH_NORMS, _AROUND, strict=True)
    ),
)
FAMILIES = (
    Family(
        "gemma4_text",
        "Gemma4",
        (
            *(_OTHERS + rows.GLOBAL_QKV + rows.MLP + _EXPERTS + rows.KEYS_QK_NORM + rows.LAYER_INPUTS),
            rows.LAYER_SCALAR,
        ),
        models="Gemma 4 E2B, E4B, 31B and 26B-A4B",
        within=("gemma4", "model.language_model."),
        moe=MoeKeys(
            "num_experts", "moe_intermediate_size", top_k="top_k_experts", aux_coef="", switch="enable_moe_block"
        ),
        keys=(
            ("attention.global_head_dim", "global_head_dim", 512),
            ("attention.global_kv_heads", "num_global_key_value_heads", 0),
            ("attention.key_is_value", "attention_k_eq_v", False),
            ("attention.kv_shared_layers", "num_kv_shared_layers", 0),
            ("double_mlp", "use_double_wide_mlp", False),
            ("layer_input_size", "hidden_size_per_layer_input", 256),
            ("moe.shared_ffn_hidden_size", "intermediate_size", 9216),
            ("scales.logits_softcap", "final_logit_softcapping", 0.0),
        ),
        constants=(
            ("use_bidirectional_attention", "vision"),  # text alone sees what came before, as with null
        ),
        default_head_dim=256,
        windows="layers",
        default_window=512,
        default_global=("sliding_window_pattern", 6),
        default_local_base=1e4,
        default_rotary_fraction=0.25,
        default_rope=(("rope_type", "proportional"),),
        defaults=(TIED, LONG, ("rope_theta", 1e6)),
        sizes=(
            ("vocab_size", 262144),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 30),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
        ),
        experts_stacked=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        scaled_embeddings=True,
        plain_scores=True,
        value_norm=True,
        served_by=("vllm",),
    ),
)
