"""Model families as data: one table per family, from Megatron's names to Hugging Face's.

Canonical names and layouts are those of Megatron's `GPTModel` with the local layer spec, at TP=1 and with the true
vocabulary. Import, export, refit and the engines read the same rows, so a family is one table and one test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.families import TRAITS
from aligner.config.sections.model.moe import check_moe_family
from aligner.errors import ConfigError
from aligner.models.params import ParamSpec, to_hf
from aligner.ops.kernels.experts import GATE_ALPHA, GATE_LIMIT


@dataclass(frozen=True)
class MoeKeys:
    """What config.json calls the fields of `model.moe`; `norm_topk_prob` empty: always true."""

    num_experts: str
    ffn_hidden_size: str
    norm_topk_prob: str = ""
    top_k: str = "num_experts_per_tok"
    aux_coef: str = "router_aux_loss_coef"
    dense_layers: str = ""  # empty: none is
    first_dense: str = ""  # instead, how many layers are
    shared: str = ""  # how many times an expert's width the MLP for every token has; empty: there is none


Key = tuple[str, str, Any]  # key of `model`, what config.json calls it, what a config.json without it means


@dataclass(frozen=True)
class Family:
    """`model_type` and the prefix of the `architectures` entry in config.json, the flags it implies, its rows. What the
    config must know of it is in `config/sections/model/families.py`."""

    model_type: str
    architecture: str
    table: tuple[ParamSpec, ...]
    moe: MoeKeys | None = None
    keys: tuple[Key, ...] = ()  # in which its models differ, beside sizes
    constants: tuple[tuple[str, Any], ...] = ()  # of config.json: the variants that are not supported
    default_rotary_fraction: float = 1.0  # what one without partial_rotary_factor means
    nope_every: int = 0  # config.json has no_rope_layers, by default layers n, 2n, ...
    default_head_dim: int = 0  # what a config.json without head_dim means; 0: hidden_size / num_attention_heads
    windows: Literal["", "every", "layers"] = ""  # which layers have one, where config.json has sliding_window
    window_switch: bool = False  # config.json must say use_sliding_window
    default_window: int = 0  # what one without sliding_window means
    default_global: tuple[str, int] = ("", 0)  # without layer_types: key and default of every n-th layer's being global
    # files may have one more layer, for predicting further tokens, which is not read; config.json's key of how many
    predicts_ahead: str = ""
    defaults: tuple[tuple[str, Any], ...] = ()  # what one without other keys means, where not DEFAULTS
    default_rope: tuple[tuple[str, Any], ...] = ()  # what one without rope_parameters and rope_scaling means
    score_architecture: str = ""  # prefix in `architectures` of a sequence classifier; empty: `architecture`
    activation_key: str = "hidden_act"  # what config.json calls the activation
    activation: str = "silu"  # of the gate; config.json's word for it
    offset_norms: bool = False  # norms multiply by 1 + weight
    pre_norms: bool = True  # what goes into attention and the MLP is normalised
    post_norms: bool = False  # what attention and the MLP add to the residual stream is normalised first
    # what its files join, rows after rows: name there, names of the parts
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # what its files stack, one entry for each expert, transposed: name there, names of parts whose columns alternate
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    clamped_gate: bool = False  # of experts, instead of SwiGLU (`ops/kernels/experts.py`)
    interleaved_rotary: bool = False  # neighbours are rotated together, not halves of the head
    scaled_embeddings: bool = False  # multiplied by the square root of the hidden size
    default_attention_every: int = 0  # config.json has layer_types: linear_attention, but for layers n, 2n, ...
    default_local_base: float = 0.0  # of local layers, where they have a rotary base of their own; 0: they have not

    @property
    def own_modules(self) -> bool:
        """Whether layers differ from those that Megatron's own modules can build."""
        usual = self.pre_norms and self.activation == "silu" and not self.interleaved_rotary
        usual = usual and not TRAITS[self.model_type].latent
        return self.offset_norms or self.post_norms or not usual


_IN, _OUT = "decoder.layers.{layer}.", "model.layers.{layer}."
_QKV_HF = tuple(_OUT + f"self_attn.{name}_proj." for name in "qkv")
_COMMON = (
    ParamSpec(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        "copy",
        0,
        ("vocab", "hidden"),
        "vocab",
        padded=True,
    ),
    ParamSpec(_IN + "input_layernorm.weight", (_OUT + "input_layernorm.weight",), "copy", None, ("hidden",)),
    ParamSpec(
        _IN + "self_attention.linear_qkv.weight",
        tuple(name + "weight" for name in _QKV_HF),
        "qkv",
        0,
        ("qkv", "hidden"),
        "groups",
    ),
    ParamSpec(
        _IN + "self_attention.linear_proj.weight",
        (_OUT + "self_attn.o_proj.weight",),
        "copy",
        1,
        ("hidden", "context"),
        "heads",
    ),
    ParamSpec(_IN + "pre_mlp_layernorm.weight", (_OUT + "post_attention_layernorm.weight",), "copy", None, ("hidden",)),
    ParamSpec("decoder.final_layernorm.weight", ("model.norm.weight",), "copy", None, ("hidden",)),
)
_MLP = (
    ParamSpec(
        _IN + "mlp.linear_fc1.weight",
        (_OUT + "mlp.gate_proj.weight", _OUT + "mlp.up_proj.weight"),
        "gate_up",
        0,
        ("2ffn", "hidden"),
        "ffn",
        kind="dense",
    ),
    ParamSpec(
        _IN + "mlp.linear_fc2.weight",
        (_OUT + "mlp.down_proj.weight",),
        "copy",
        1,
        ("hidden", "ffn"),
        "ffn",
        kind="dense",
    ),
)


def _experts(block: str, gate: str, up: str, down: str, router: str = "gate") -> tuple[ParamSpec, ...]:
    """Rows of a layer of experts by its names in Hugging Face's files."""
    at = f"{_OUT}{block}.experts.{{expert}}."
    both = (f"{at}{gate}.weight", f"{at}{up}.weight")
    inner, outer = ("experts", "2", "expert_ffn", "hidden"), ("experts", "hidden", "expert_ffn")
    return (
        ParamSpec(
            _IN + "mlp.router.weight",
            (f"{_OUT}{block}.{router}.weight",),
            "copy",
            None,
            ("experts", "hidden"),
            kind="sparse",
        ),
        ParamSpec(
            _IN + "mlp.experts.gate_up",
            both,
            "experts_gate_up",
            2,
            inner,
            "expert_ffn",
            experts=True,
            kind="sparse",
        ),
        ParamSpec(
            _IN + "mlp.experts.down",
            (f"{at}{down}.weight",),
            "experts",
            2,
            outer,
            "expert_ffn",
            experts=True,
            kind="sparse",
        ),
    )


def _expert_biases(block: str, gate: str, up: str, down: str, router: str) -> tuple[ParamSpec, ...]:
    at = f"{_OUT}{block}.experts.{{expert}}."
    both, inner = (f"{at}{gate}.bias", f"{at}{up}.bias"), ("experts", "2", "expert_ffn")
    fc1, fc2 = (f"{_IN}mlp.experts.linear_fc{i}.bias" for i in (1, 2))
    return (
        ParamSpec(
            _IN + "mlp.router.bias", (f"{_OUT}{block}.{router}.bias",), "copy", None, ("experts",), kind="sparse"
        ),
        ParamSpec(fc1, both, "experts_gate_up", 2, inner, "expert_ffn", experts=True, kind="sparse"),
        ParamSpec(fc2, (f"{at}{down}.bias",), "experts", None, ("experts", "hidden"), experts=True, kind="sparse"),
    )


def _sigmoid_router(block: str, shared: str) -> tuple[ParamSpec, ...]:
    """The rows beside `_experts` of a router with a bias, and of the MLP for every token."""
    bias = f"{_OUT}{block}.gate.e_score_correction_bias"
    return (
        ParamSpec(_IN + "mlp.router.expert_bias", (bias,), "copy", None, ("experts",), float32=True, kind="sparse"),
        *_shared_expert(block, shared),
    )


def _shared_expert(block: str, shared: str, gate: str = "") -> tuple[ParamSpec, ...]:
    """The rows of the MLP for every token and, if it has a name, of the gate of its output."""
    at, ours = f"{_OUT}{block}.{shared}.", _IN + "mlp.shared_experts."
    both = f"{at}gate_proj.weight", f"{at}up_proj.weight"
    inner, outer, units = ("2shared_ffn", "hidden"), ("hidden", "shared_ffn"), "shared_ffn"
    gates = (f"{_OUT}{block}.{gate}.weight",)
    rows = (
        ParamSpec(ours + "gate_weight", gates, "copy", None, ("1", "hidden"), kind="sparse"),
        ParamSpec(ours + "linear_fc1.weight", both, "gate_up", 0, inner, units, kind="sparse"),
        ParamSpec(ours + "linear_fc2.weight", (f"{at}down_proj.weight",), "copy", 1, outer, units, kind="sparse"),
    )
    return rows if gate else rows[1:]


def _latent(ours: str, hf: str, shape: tuple[str, ...], units: str = "", when: str = "") -> ParamSpec:
    """`units`: empty for what every tensor rank has whole."""
    names = f"{_IN}self_attention.{ours}.weight", (f"{_OUT}self_attn.{hf}.weight",)
    return ParamSpec(*names, "copy", 0 if units else None, shape, units or 0, when=when)


# Megatron's names (`MLASelfAttention`)
_LATENT = (
    *(row for row in _COMMON if "linear_qkv" not in row.canonical),
    _latent("linear_q_proj", "q_proj", ("q", "hidden"), "heads", when="direct_queries"),
    _latent("linear_q_down_proj", "q_a_proj", ("q_rank", "hidden"), when="latent_queries"),
    _latent("q_layernorm", "q_a_layernorm", ("q_rank",), when="latent_queries"),
    _latent("linear_q_up_proj", "q_b_proj", ("q", "q_rank"), "heads", when="latent_queries"),
    _latent("linear_kv_down_proj", "kv_a_proj_with_mqa", ("kv_rank+rotary", "hidden")),
    _latent("kv_layernorm", "kv_a_layernorm", ("kv_rank",)),
    _latent("linear_kv_up_proj", "kv_b_proj", ("plain+value", "kv_rank"), "heads"),
)
_QKV_BIAS = (
    ParamSpec(
        _IN + "self_attention.linear_qkv.bias",
        tuple(name + "bias" for name in _QKV_HF),
        "qkv_bias",
        0,
        ("qkv",),
        "groups",
        when="qkv_bias",
    ),
)
_BIASES = (
    *_QKV_BIAS,
    ParamSpec(
        _IN + "self_attention.linear_proj.bias",
        (_OUT + "self_attn.o_proj.bias",),
        "copy",
        None,
        ("hidden",),
        when="output_bias",
    ),
)
_MLP_BIASES = (
    ParamSpec(
        _IN + "mlp.linear_fc1.bias",
        (_OUT + "mlp.gate_proj.bias", _OUT + "mlp.up_proj.bias"),
        "gate_up",
        0,
        ("2ffn",),
        "ffn",
        when="mlp_bias",
    ),
    ParamSpec(_IN + "mlp.linear_fc2.bias", (_OUT + "mlp.down_proj.bias",), "copy", None, ("hidden",), when="mlp_bias"),
)
_QK_NORM = tuple(
    ParamSpec(
        _IN + f"self_attention.{x}_layernorm.weight", (_OUT + f"self_attn.{x}_norm.weight",), "copy", None, ("head",)
    )
    for x in "qk"
)
_WIDE_QK_NORM = tuple(
    ParamSpec(
        _IN + f"self_attention.{x}_layernorm.weight", (_OUT + f"self_attn.{x}_norm.weight",), "copy", 0, (size,), units
    )
    for x, size, units in (("q", "q", "heads"), ("k", "kv", "groups"))
)


def _with_norms(**names: str) -> tuple[ParamSpec, ...]:
    """The common rows with these norms in the layers, by the names in Hugging Face's files, in place of the usual two:
    `before` and `behind` attention, `before_mlp`, `behind_mlp`. Families call different norms by one name."""
    places = {
        "before": "input_layernorm",
        "before_mlp": "pre_mlp_layernorm",
        "behind": "self_attention.post_layernorm",
        "behind_mlp": "mlp.post_layernorm",
    }
    others = tuple(row for row in _COMMON if not row.canonical.startswith(_IN) or "layernorm" not in row.canonical)
    return others + tuple(
        ParamSpec(f"{_IN}{places[place]}.weight", (f"{_OUT}{hf}.weight",), "copy", None, ("hidden",))
        for place, hf in names.items()
    )


_GEMMA_NORMS = _with_norms(
    before="input_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind="post_attention_layernorm",
    behind_mlp="post_feedforward_layernorm",
)
_SINKS = ParamSpec(_IN + "self_attention.sinks.weight", (_OUT + "self_attn.sinks",), "copy", 0, ("heads",), "heads")
_AT, _AT_HF = _IN + "self_attention.", _OUT + "linear_attn."
_DELTA_NET = (
    ParamSpec(
        _AT + "in_proj.weight",
        (_AT_HF + "in_proj_qkvz.weight", _AT_HF + "in_proj_ba.weight"),
        "linear_in",
        0,
        ("linear_in", "hidden"),
        "key_heads",
        kind="linear",
    ),
    # whole on every tensor rank: its queries, keys and values are not neighbours
    ParamSpec(
        _AT + "conv1d.weight",
        (_AT_HF + "conv1d.weight",),
        "copy",
        None,
        ("linear_mixed", "1", "conv"),
        kind="linear",
    ),
    ParamSpec(_AT + "A_log", (_AT_HF + "A_log",), "copy", 0, ("value_heads",), "key_heads", kind="linear"),
    ParamSpec(_AT + "dt_bias", (_AT_HF + "dt_bias",), "copy", 0, ("value_heads",), "key_heads", kind="linear"),
    ParamSpec(_AT + "out_norm.weight", (_AT_HF + "norm.weight",), "copy", None, ("value_head",), kind="linear"),
    ParamSpec(
        _AT + "out_proj.weight",
        (_AT_HF + "out_proj.weight",),
        "copy",
        1,
        ("hidden", "linear_out"),
        "key_heads",
        kind="linear",
    ),
)


def _in_attention_layers(rows: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    """The same, those of attention in layers alone that have it."""
    return tuple(replace(row, kind="attention") if row.canonical.startswith(_AT) else row for row in rows)


_LM_HEAD = ParamSpec("output_layer.weight", ("lm_head.weight",), "copy", 0, ("vocab", "hidden"), "vocab", padded=True)
_SCORE_HEAD = ParamSpec("output_layer.weight", ("score.weight",), "copy", None, ("labels", "hidden"))

# what config.json means to transformers where it lacks a key; families differ in some of them
DEFAULTS = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
}
_LONG = ("max_position_embeddings", 4096 * 32)
_FUSED_QKV = ("self_attn.qkv_proj", tuple(f"self_attn.{x}_proj" for x in "qkv"))
_FUSED_MLP = ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
_GPT_OSS_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj", "router")
_ATTENTION_BIAS: Key = ("qkv_bias", "attention_bias", False)
_BIAS_KEYS: tuple[Key, ...] = (_ATTENTION_BIAS, ("mlp_bias", "mlp_bias", False))
_QWEN_LAYERS: dict[str, Any] = {
    "windows": "layers",
    "window_switch": True,
    "default_window": 4096,
    "default_global": ("max_window_layers", 28),
}
_GLM: dict[str, Any] = {
    "keys": (("qkv_bias", "attention_bias", True),),
    "fused": (_FUSED_MLP,),
    "interleaved_rotary": True,
    "default_rotary_fraction": 0.5,
    "default_head_dim": 128,
    "defaults": (_LONG, ("rms_norm_eps", 1.5625e-7)),
}
_OLMO: dict[str, Any] = {
    "table": _with_norms(behind="post_attention_layernorm", behind_mlp="post_feedforward_layernorm")
    + _MLP
    + _WIDE_QK_NORM
    + _BIASES,
    "keys": (_ATTENTION_BIAS,),
    "pre_norms": False,
    "post_norms": True,
    "defaults": (("max_position_embeddings", 2048), ("rms_norm_eps", 1e-5)),
}
FAMILIES = {
    "llama": Family(
        "llama",
        "Llama",
        _COMMON + _MLP + _BIASES + _MLP_BIASES,
        keys=_BIAS_KEYS,
        defaults=(("max_position_embeddings", 2048),),
    ),
    "mistral": Family("mistral", "Mistral", _COMMON + _MLP, windows="every", default_window=4096, defaults=(_LONG,)),
    "qwen2": Family("qwen2", "Qwen2", _COMMON + _MLP + _QKV_BIAS, **_QWEN_LAYERS),
    "qwen3": Family(
        "qwen3",
        "Qwen3",
        _COMMON + _MLP + _QK_NORM + _BIASES,
        keys=(_ATTENTION_BIAS,),
        default_head_dim=128,
        **_QWEN_LAYERS,
    ),
    "gemma3_text": Family(
        "gemma3_text",
        "Gemma3",
        _GEMMA_NORMS + _MLP + _QK_NORM + _BIASES,
        keys=(_ATTENTION_BIAS, ("attention.query_scale_dim", "query_pre_attn_scalar", 256)),
        constants=(
            ("attn_logit_softcapping", None),
            ("final_logit_softcapping", None),
            ("use_bidirectional_attention", False),
        ),
        default_head_dim=256,
        windows="layers",
        default_window=4096,
        default_global=("sliding_window_pattern", 6),
        defaults=(_LONG, ("rope_theta", 1e6)),
        score_architecture="Gemma3Text",
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        offset_norms=True,
        post_norms=True,
        scaled_embeddings=True,
        default_local_base=1e4,
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2",
        _GEMMA_NORMS + _MLP + _BIASES,
        keys=(
            _ATTENTION_BIAS,
            ("attention.query_scale_dim", "query_pre_attn_scalar", 256),
            ("attention.softcap", "attn_logit_softcapping", 50.0),
            ("scales.logits_softcap", "final_logit_softcapping", 30.0),
        ),
        constants=(("use_bidirectional_attention", False),),
        default_head_dim=256,
        windows="layers",
        default_window=4096,
        default_global=("sliding_window_pattern", 2),
        defaults=(("max_position_embeddings", 8192),),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        offset_norms=True,
        post_norms=True,
        scaled_embeddings=True,
    ),
    "phi3": Family(
        "phi3",
        "Phi3",
        _COMMON + _MLP,
        fused=(_FUSED_QKV, _FUSED_MLP),
        windows="every",
        defaults=(("max_position_embeddings", 4096), ("rms_norm_eps", 1e-5)),
    ),
    "glm": Family("glm", "Glm", _COMMON + _MLP + _QKV_BIAS, **_GLM),
    "glm4": Family(
        "glm4",
        "Glm4",
        _with_norms(
            before="input_layernorm",
            before_mlp="post_attention_layernorm",
            behind="post_self_attn_layernorm",
            behind_mlp="post_mlp_layernorm",
        )
        + _MLP
        + _QKV_BIAS,
        post_norms=True,
        **_GLM,
    ),
    "granite": Family(
        "granite",
        "Granite",
        _COMMON + _MLP + _BIASES + _MLP_BIASES,
        keys=(
            *_BIAS_KEYS,
            ("attention.multiplier", "attention_multiplier", 1.0),
            ("scales.embedding", "embedding_multiplier", 1.0),
            ("scales.residual", "residual_multiplier", 1.0),
            ("scales.logits", "logits_scaling", 1.0),
        ),
        defaults=(("max_position_embeddings", 2048),),
    ),
    "smollm3": Family(
        "smollm3",
        "SmolLM3",
        _COMMON + _MLP + _BIASES + _MLP_BIASES,
        keys=_BIAS_KEYS,
        windows="layers",
        window_switch=True,
        default_global=("no_rope_layers", 0),
        nope_every=4,
        defaults=(("rope_theta", 2e6),),
    ),
    "olmo2": Family("olmo2", "Olmo2", **_OLMO),
    "olmo3": Family(
        "olmo3",
        "Olmo3",
        windows="layers",
        default_window=4096,
        default_global=("sliding_window_pattern", 4),
        default_local_base=5e5,
        **_OLMO | {"defaults": (*_OLMO["defaults"], ("rope_theta", 5e5))},
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3Moe",
        _COMMON + _MLP + _experts("mlp", "gate_proj", "up_proj", "down_proj") + _QK_NORM + _BIASES,
        moe=MoeKeys("num_experts", "moe_intermediate_size", "norm_topk_prob", dense_layers="mlp_only_layers"),
        keys=(_ATTENTION_BIAS,),
        windows="every",
        window_switch=True,
        default_window=4096,
        constants=(("decoder_sparse_step", 1),),
    ),
    "mixtral": Family(
        "mixtral",
        "Mixtral",
        _COMMON + _experts("block_sparse_moe", "w1", "w3", "w2"),
        moe=MoeKeys("num_local_experts", "intermediate_size"),
        windows="every",
        defaults=(_LONG, ("rope_theta", 1e6), ("rms_norm_eps", 1e-5)),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOss",
        _COMMON + _experts(*_GPT_OSS_EXPERTS) + _expert_biases(*_GPT_OSS_EXPERTS) + _BIASES + (_SINKS,),
        moe=MoeKeys("num_local_experts", "intermediate_size"),
        keys=(("qkv_bias", "attention_bias", True),),
        constants=(("swiglu_limit", GATE_LIMIT), ("swiglu_alpha", GATE_ALPHA)),
        default_head_dim=64,
        windows="layers",
        default_window=128,
        default_global=("sliding_window_pattern", 2),
        defaults=(_LONG, ("rope_theta", 1.5e5), ("rms_norm_eps", 1e-5)),
        default_rope=(
            ("rope_type", "yarn"),
            ("factor", 32.0),
            ("truncate", False),
            ("original_max_position_embeddings", 4096),
        ),
        stacked=(
            ("gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
            ("gate_up_proj_bias", ("gate_proj.bias", "up_proj.bias")),
            ("down_proj", ("down_proj.weight",)),
            ("down_proj_bias", ("down_proj.bias",)),
        ),
        clamped_gate=True,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3",
        _LATENT
        + _MLP
        + _experts("mlp", "gate_proj", "up_proj", "down_proj")
        + _sigmoid_router("mlp", "shared_experts"),
        moe=MoeKeys(
            "n_routed_experts",
            "moe_intermediate_size",
            "norm_topk_prob",
            aux_coef="",
            first_dense="first_k_dense_replace",
            shared="n_shared_experts",
        ),
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
    "qwen3_next": Family(
        "qwen3_next",
        "Qwen3Next",
        _in_attention_layers(_COMMON + _QK_NORM)
        + _DELTA_NET
        + _MLP
        + _experts("mlp", "gate_proj", "up_proj", "down_proj")
        + _shared_expert("mlp", "shared_expert", "shared_expert_gate"),
        moe=MoeKeys("num_experts", "moe_intermediate_size", "norm_topk_prob", dense_layers="mlp_only_layers"),
        keys=(
            ("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 512),
            ("linear.key_heads", "linear_num_key_heads", 16),
            ("linear.value_heads", "linear_num_value_heads", 32),
            ("linear.key_head_dim", "linear_key_head_dim", 128),
            ("linear.value_head_dim", "linear_value_head_dim", 128),
            ("linear.conv", "linear_conv_kernel_dim", 4),
        ),
        constants=(("decoder_sparse_step", 1),),
        default_head_dim=256,
        default_rotary_fraction=0.25,
        default_attention_every=4,
        offset_norms=True,
    ),
}


def check_family(cfg: ModelConfig) -> Family:
    """The family of `cfg`; ConfigError where a flag says what the family's checkpoints cannot hold."""
    family = FAMILIES[cfg.family]
    traits = TRAITS[cfg.family]
    for flag in ("qkv_bias", "qk_norm"):
        if flag not in traits.varies and getattr(cfg, flag) != getattr(traits, flag):
            raise ConfigError(
                f"model.{flag}", getattr(cfg, flag), f"{getattr(traits, flag)} for model.family={cfg.family}"
            )
    check_moe_family(cfg.family, cfg.moe)
    if cfg.vocab_size < 1:
        raise ConfigError("model.vocab_size", cfg.vocab_size, "the tokenizer's vocabulary size, filled in before use")
    return family


def embedding_factor(cfg: ModelConfig, dtype: torch.dtype) -> float:
    """What embeddings are multiplied by; Gemma's authors round the square root of the hidden size to the dtype."""
    root = float(torch.tensor(cfg.hidden_size**0.5, device="cpu").to(dtype))
    return (root if FAMILIES[cfg.family].scaled_embeddings else 1.0) * cfg.scales.embedding


def dimensions(cfg: ModelConfig, num_labels: int = 1) -> dict[str, int]:
    head, heads, groups, linear = cfg.kv_channels, cfg.num_heads, cfg.num_kv_heads, cfg.linear
    return {
        "1": 1,
        "vocab": cfg.vocab_size,
        "hidden": cfg.hidden_size,
        "ffn": cfg.ffn_hidden_size,
        "2ffn": 2 * cfg.ffn_hidden_size,
        "experts": cfg.moe.num_experts,
        "expert_ffn": cfg.expert_ffn,
        "2": 2,
        "head": head,
        "heads": heads,
        "groups": groups,
        "shared_ffn": cfg.moe.shared_ffn_hidden_size,
        "2shared_ffn": 2 * cfg.moe.shared_ffn_hidden_size,
        "q": heads * head,
        "context": heads * cfg.value_channels,
        "q_rank": cfg.latent.query_rank,
        "kv_rank": cfg.latent.kv_rank,
        "kv_rank+rotary": cfg.latent.kv_rank + cfg.latent.rotary_dim,
        "plain+value": heads * (cfg.latent.plain_dim + cfg.latent.value_dim),
        "kv": groups * head,
        "qkv": (cfg.queries_per_group + 2) * groups * head,
        "key_heads": linear.key_heads,
        "value_heads": linear.value_heads,
        "value_head": linear.value_head_dim,
        "linear_in": linear.key_heads * linear.width,
        "linear_mixed": linear.key_heads * linear.mixed_width,
        "linear_out": linear.value_heads * linear.value_head_dim,
        "conv": linear.conv,
        "labels": num_labels,
    }


def family_table(cfg: ModelConfig, head: str = "lm", num_labels: int = 1) -> list[ParamSpec]:
    """Every parameter of the model, layers expanded, sizes filled in.

    `head`: "lm" (no row of its own when embeddings are tied) or "score" (reward and value models, `num_labels` rows).
    """
    assert head in ("lm", "score"), f"head={head!r}: expected lm or score"
    rows = [row for row in check_family(cfg).table if not row.when or getattr(cfg, row.when)]
    if head == "score":
        rows.append(_SCORE_HEAD)
    elif not cfg.tie_embeddings:
        rows.append(_LM_HEAD)
    sizes = dimensions(cfg, num_labels)
    out = []
    for row in rows:
        layers = cfg.layers_of(row.kind) if row.kind else range(cfg.num_layers)
        for layer in layers if "{layer}" in row.canonical else (0,):
            out.append(
                ParamSpec(
                    row.canonical.format(layer=layer),
                    tuple(
                        name.format(layer=layer, expert=expert)
                        for expert in (range(cfg.moe.num_experts) if row.experts else (0,))
                        for name in row.hf
                    ),
                    row.transform,
                    row.tp_axis,
                    tuple(sizes[name] for name in row.shape),
                    sizes[row.units] if isinstance(row.units, str) else 0,
                    row.padded,
                    row.experts,
                    float32=row.float32,
                )
            )
    return out


def expected_hf_shapes(cfg: ModelConfig, head: str = "lm", num_labels: int = 1) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor a checkpoint of this model holds."""
    out: dict[str, tuple[int, ...]] = {}
    for spec in family_table(cfg, head, num_labels):
        for name, t in to_hf(spec, torch.empty(spec.shape, device="meta"), cfg).items():
            out[name] = tuple(t.shape)
    return out
