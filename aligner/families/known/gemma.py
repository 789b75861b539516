"""Gemma 2, and the language model of Gemma 3."""

from __future__ import annotations

from typing import Any

from aligner.families import rows
from aligner.families.family import ATTENTION_BIAS, LONG, TIED, Family, Key

_SCALE: Key = ("attention.query_scale_dim", "query_pre_attn_scalar", 256)
NORMS = rows.norms(
    before="input_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind="post_attention_layernorm",
    behind_mlp="post_feedforward_layernorm",
)
# of Gemma 3's folders with a vision tower, whose text_config leaves out what its class has as defaults
_SIZES = (
    ("vocab_size", 262208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
)
_BOTH: dict[str, Any] = {
    "default_head_dim": 256,
    "windows": "layers",
    "default_window": 4096,
    "activation_key": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "offset_norms": True,
    "scaled_embeddings": True,
    "served_by": ("vllm",),
}
FAMILIES = (
    Family(
        "gemma2",
        "Gemma2",
        NORMS + rows.MLP + rows.BIASES,
        models="Gemma 2",
        keys=(
            ATTENTION_BIAS,
            _SCALE,
            ("attention.softcap", "attn_logit_softcapping", 50.0),
            ("scales.logits_softcap", "final_logit_softcapping", 30.0),
        ),
        constants=(("use_bidirectional_attention", False),),
        default_global=("sliding_window_pattern", 2),
        defaults=(TIED, ("max_position_embeddings", 8192)),
        **_BOTH,
    ),
    Family(
        "gemma3_text",
        "Gemma3",
        NORMS + rows.MLP + rows.QK_NORM + rows.BIASES,
        models="Gemma 3",
        within=("gemma3", "language_model.model."),
        keys=(ATTENTION_BIAS, _SCALE),
        constants=(
            ("attn_logit_softcapping", None),
            ("final_logit_softcapping", None),
            ("use_bidirectional_attention", False),
        ),
        default_global=("sliding_window_pattern", 6),
        defaults=(TIED, LONG, ("rope_theta", 1e6)),
        sizes=_SIZES,
        score_architecture="Gemma3Text",
        default_local_base=1e4,
        **_BOTH,
    ),
)
