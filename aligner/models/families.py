"""Model families as data: one table per family, from Megatron's names to Hugging Face's.

Canonical names and layouts are those of Megatron's `GPTModel` with the local layer spec, at TP=1 and with the true
vocabulary. Import, export, refit and the engines read the same rows, so a family is one table and one test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.families import TRAITS
from aligner.config.sections.model.moe import check_moe_family
from aligner.errors import ConfigError
from aligner.models import rows
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


_GEMMA_NORMS = rows.norms(
    before="input_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind="post_attention_layernorm",
    behind_mlp="post_feedforward_layernorm",
)
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
    "table": rows.norms(behind="post_attention_layernorm", behind_mlp="post_feedforward_layernorm")
    + rows.MLP
    + rows.WIDE_QK_NORM
    + rows.BIASES,
    "keys": (_ATTENTION_BIAS,),
    "pre_norms": False,
    "post_norms": True,
    "defaults": (("max_position_embeddings", 2048), ("rms_norm_eps", 1e-5)),
}
FAMILIES = {
    "llama": Family(
        "llama",
        "Llama",
        rows.COMMON + rows.MLP + rows.BIASES + rows.MLP_BIASES,
        keys=_BIAS_KEYS,
        defaults=(("max_position_embeddings", 2048),),
    ),
    "mistral": Family(
        "mistral", "Mistral", rows.COMMON + rows.MLP, windows="every", default_window=4096, defaults=(_LONG,)
    ),
    "qwen2": Family("qwen2", "Qwen2", rows.COMMON + rows.MLP + rows.QKV_BIAS, **_QWEN_LAYERS),
    "qwen3": Family(
        "qwen3",
        "Qwen3",
        rows.COMMON + rows.MLP + rows.QK_NORM + rows.BIASES,
        keys=(_ATTENTION_BIAS,),
        default_head_dim=128,
        **_QWEN_LAYERS,
    ),
    "gemma3_text": Family(
        "gemma3_text",
        "Gemma3",
        _GEMMA_NORMS + rows.MLP + rows.QK_NORM + rows.BIASES,
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
        _GEMMA_NORMS + rows.MLP + rows.BIASES,
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
        rows.COMMON + rows.MLP,
        fused=(_FUSED_QKV, _FUSED_MLP),
        windows="every",
        defaults=(("max_position_embeddings", 4096), ("rms_norm_eps", 1e-5)),
    ),
    "glm": Family("glm", "Glm", rows.COMMON + rows.MLP + rows.QKV_BIAS, **_GLM),
    "glm4": Family(
        "glm4",
        "Glm4",
        rows.norms(
            before="input_layernorm",
            before_mlp="post_attention_layernorm",
            behind="post_self_attn_layernorm",
            behind_mlp="post_mlp_layernorm",
        )
        + rows.MLP
        + rows.QKV_BIAS,
        post_norms=True,
        **_GLM,
    ),
    "granite": Family(
        "granite",
        "Granite",
        rows.COMMON + rows.MLP + rows.BIASES + rows.MLP_BIASES,
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
        rows.COMMON + rows.MLP + rows.BIASES + rows.MLP_BIASES,
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
        rows.COMMON + rows.MLP + rows.experts("mlp", "gate_proj", "up_proj", "down_proj") + rows.QK_NORM + rows.BIASES,
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
        rows.COMMON + rows.experts("block_sparse_moe", "w1", "w3", "w2"),
        moe=MoeKeys("num_local_experts", "intermediate_size"),
        windows="every",
        defaults=(_LONG, ("rope_theta", 1e6), ("rms_norm_eps", 1e-5)),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOss",
        rows.COMMON
        + rows.experts(*_GPT_OSS_EXPERTS)
        + rows.expert_biases(*_GPT_OSS_EXPERTS)
        + rows.BIASES
        + (rows.SINKS,),
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
        rows.LATENT
        + rows.MLP
        + rows.experts("mlp", "gate_proj", "up_proj", "down_proj")
        + rows.sigmoid_router("mlp", "shared_experts"),
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
        rows.in_attention_layers(rows.COMMON + rows.QK_NORM)
        + rows.DELTA_NET
        + rows.MLP
        + rows.experts("mlp", "gate_proj", "up_proj", "down_proj")
        + rows.shared_expert("mlp", "shared_expert", "shared_expert_gate"),
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
    table = [row for row in check_family(cfg).table if not row.when or getattr(cfg, row.when)]
    if head == "score":
        table.append(rows.SCORE_HEAD)
    elif not cfg.tie_embeddings:
        table.append(rows.LM_HEAD)
    sizes = dimensions(cfg, num_labels)
    out = []
    for row in table:
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
