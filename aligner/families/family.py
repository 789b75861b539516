"""What is known of a model family: its rows, and what config.json calls what varies between its models.

Config, `plan`, trainer, engines, import and export read the same entry. What a family's layers have is derived from
its rows, so that no two of them can disagree about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from aligner.families.rows import ParamSpec, in_layer


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


GATE_LIMIT, GATE_ALPHA = 7.0, 1.702  # of a clamped gate
Key = tuple[str, str, Any]  # key of `model`, what config.json calls it, what a config.json without it means
LAYERS = ("attention.global_every", "attention.global_layers")  # keys of which have windows, where not all
# what config.json means to transformers where it lacks a key; families differ in some of them
DEFAULTS = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def _has(*names: str) -> Any:
    """Whether the family has a row of one of these names in its layers."""
    return cached_property(lambda family: any(in_layer(name) in family.names for name in names))


@dataclass(frozen=True)
class Family:
    """`model_type` and the prefix of the `architectures` entry in config.json, the rows, what config.json says."""

    model_type: str
    architecture: str
    table: tuple[ParamSpec, ...]
    models: str = ""  # published ones, for docs/reference/support.md
    moe: MoeKeys | None = None
    keys: tuple[Key, ...] = ()  # in which its models differ, beside sizes
    constants: tuple[tuple[str, Any], ...] = ()  # of config.json: the variants that are not supported
    default_rotary_fraction: float = 0.0  # what one without partial_rotary_factor means; 0: heads are rotated whole
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
    # what its files join, rows after rows: name there, names of the parts
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # what its files stack, one entry for each expert, transposed (or in MXFP4): name there, names of parts whose
    # columns alternate
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    clamped_gate: bool = False  # of experts, instead of SwiGLU (`ops/kernels/experts.py`)
    interleaved_rotary: bool = False  # neighbours are rotated together, not halves of the head
    scaled_embeddings: bool = False  # multiplied by the square root of the hidden size
    gated_attention: bool = False  # attention's output is multiplied by the sigmoid of gates, made with the queries
    default_attention_every: int = 0  # config.json has layer_types: linear_attention, but for layers n, 2n, ...
    default_local_base: float = 0.0  # of local layers, where they have a rotary base of their own; 0: they have not
    # engines that serve it beside native and trtllm: vllm, where its logprobs were compared with transformers';
    # trtllm_engine, where the class in TensorRT-LLM was read parameter by parameter
    served_by: tuple[str, ...] = ()
    vllm_divides_hidden: bool = False  # to vLLM a head is hidden_size / num_attention_heads, whatever head_dim says

    latent = _has("self_attention.kv_layernorm.weight")  # latent attention
    linear = _has("self_attention.conv1d.weight")  # layers without attention: `model.linear`
    qk_norm = _has("self_attention.k_layernorm.weight")
    qkv_bias = _has("self_attention.linear_qkv.bias")  # all its models, where `varies` lacks it
    output_bias = _has("self_attention.linear_proj.bias")  # where queries, keys and values have one
    sinks = _has("self_attention.sinks.weight")  # a learned score of each head joins the softmax, without a value
    sigmoid_router = _has("mlp.router.expert_bias")  # by sigmoids and a bias, in groups, not by a softmax
    expert_bias = _has("mlp.router.bias")  # router and experts have biases
    shared_gate = _has("mlp.shared_experts.gate_weight")  # the MLP for every token is multiplied by a gate's sigmoid
    pre_norms = _has("input_layernorm.weight")  # what goes into attention and the MLP is normalised
    # what attention and the MLP add to the residual stream is normalised first
    post_norms = _has("self_attention.post_layernorm.weight")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(row.canonical for row in self.table)

    @cached_property
    def wide_qk_norm(self) -> bool:
        """Over all heads of a token, not over each."""
        return any(row.canonical.endswith("self_attention.k_layernorm.weight") and row.units for row in self.table)

    @property
    def norms(self) -> int:
        """Of a layer, over the hidden size."""
        return 2 * (self.pre_norms + self.post_norms)

    @property
    def own_layers(self) -> bool:
        """Whether they differ from those that Megatron's own modules, and TransformerEngine's, can build."""
        return bool(self.post_norms or self.interleaved_rotary or self.latent or self.linear or self.sinks)

    @property
    def joined(self) -> bool:
        """Whether its files keep several matrices in one tensor."""
        return bool(self.fused or self.stacked)

    @cached_property
    def varies(self) -> tuple[str, ...]:
        """Keys of `model`, beside sizes, in which two models of the family may differ."""
        moe = self.moe or MoeKeys("", "")
        beside = {
            "attention.window": self.windows,
            **dict.fromkeys(LAYERS, self.windows == "layers"),
            "attention.local_rope_base": self.default_local_base,
            "attention.nope_layers": self.nope_every,
            "attention.rotary_fraction": self.default_rotary_fraction,
            "linear.attention_every": self.default_attention_every,
            "linear.attention_layers": self.default_attention_every,
            "moe.dense_layers": moe.dense_layers or moe.first_dense,
            "moe.shared_ffn_hidden_size": moe.shared,
        }
        return *(key for key, _, _ in self.keys), *(key for key, there in beside.items() if there)


LONG = ("max_position_embeddings", 4096 * 32)
TIED = ("tie_word_embeddings", True)
FUSED_QKV = ("self_attn.qkv_proj", tuple(f"self_attn.{x}_proj" for x in "qkv"))
FUSED_MLP = ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
ATTENTION_BIAS: Key = ("qkv_bias", "attention_bias", False)
BIAS_KEYS: tuple[Key, ...] = (ATTENTION_BIAS, ("mlp_bias", "mlp_bias", False))
