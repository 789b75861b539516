"""Gemma 4's dense language models: global layers have heads of their own, whose values may be their keys."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import LONG, TIED, Family
from aligner.families.known.gemma import NORMS

_OTHERS = tuple(row for row in NORMS if "linear_qkv" not in row.canonical)
FAMILIES = (
    Family(
        "gemma4_text",
        "Gemma4",
        _OTHERS + rows.GLOBAL_QKV + rows.MLP + rows.QK_NORM + (rows.LAYER_SCALAR,),
        models="Gemma 4 31B",
        within=("gemma4", "model.language_model."),
        keys=(
            ("attention.global_head_dim", "global_head_dim", 512),
            ("attention.global_kv_heads", "num_global_key_value_heads", 0),
            ("attention.key_is_value", "attention_k_eq_v", False),
            ("scales.logits_softcap", "final_logit_softcapping", 0.0),
        ),
        constants=(
            ("hidden_size_per_layer_input", 0),
            ("num_kv_shared_layers", 0),
            ("enable_moe_block", False),
            ("use_double_wide_mlp", False),
            ("use_bidirectional_attention", "vision"),  # text alone sees what came before, as with null
        ),
        default_head_dim=256,
        windows="layers",
        default_window=512,
        default_global=("sliding_window_pattern", 6),
        default_local_base=1e4,
        default_rotary_fraction=0.25,
        default_rope=(("rope_type", "proportional"),),
        defaults=(TIED, LONG, ("rope_theta", 1e6), ("hidden_size_per_layer_input", 256)),
        sizes=(
            ("vocab_size", 262144),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 30),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
        ),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        scaled_embeddings=True,
        plain_scores=True,
        value_norm=True,
    ),
)
