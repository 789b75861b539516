"""Facts about a model family: its rows, and config.json's names of the settings in which its models differ.

Config, `plan`, trainer, engines, import and export read the same entry. Properties of a family's layers are derived
from its rows, so they cannot contradict them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from aligner.families.rows import ParamSpec, in_layer


@dataclass(frozen=True)
class MoeKeys:
    """config.json's names of the fields of `model.moe`; `norm_topk_prob` empty: always true. `switch`: its flag of
    whether there are experts; empty: always."""

    num_experts: str
    ffn_hidden_size: str
    norm_topk_prob: str = ""
    top_k: str = "num_experts_per_tok"
    aux_coef: str = "router_aux_loss_coef"
    dense_layers: str = ""  # list of dense layers; empty: no layer is dense
    first_dense: str = ""  # instead, number of dense layers at the beginning
    shared: str = ""  # width of the shared MLP, in widths of an expert; empty: there is none
    switch: str = ""


GATE_LIMIT, GATE_ALPHA = 7.0, 1.702  # of a clamped gate
Names = tuple[tuple[str, str], ...]  # beginnings of names -> what replaces them
Key = tuple[str, str, Any]  # key of `model`, config.json's name of it, value for a config.json without it
LAYERS = ("attention.global_every", "attention.global_layers")  # keys of the layers with windows, if not all
# transformers' values for keys that config.json lacks; families differ in some
DEFAULTS = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def _has(*names: str) -> Any:
    """Return a property: whether the family has a row of one of these names in its layers."""
    return cached_property(lambda family: any(in_layer(name) in family.names for name in names))


@dataclass(frozen=True)
class Family:
    """A family: `model_type` and the prefix of `architectures` in config.json, the rows, and config.json's settings."""

    model_type: str
    architecture: str
    table: tuple[ParamSpec, ...]
    also: tuple[str, ...] = ()  # other names of `model_type` in config.json, which exports do not have
    models: str = ""  # published ones, for docs/reference/support.md
    # model_type of models that have it as text_config beside a vision tower, prefix of its body's names there
    within: tuple[str, str] = ("", "")
    moe: MoeKeys | None = None
    keys: tuple[Key, ...] = ()  # in which its models differ, besides sizes
    constants: tuple[tuple[str, Any], ...] = ()  # values of config.json; other values are not supported
    default_rotary_fraction: float = 0.0  # for a config.json without partial_rotary_factor; 0: heads are rotated whole
    nope_every: int = 0  # config.json has no_rope_layers, by default layers n, 2n, ...
    default_head_dim: int = 0  # for a config.json without head_dim; 0: hidden_size / num_attention_heads
    windows: Literal["", "every", "layers"] = ""  # layers with one, if config.json has sliding_window
    window_switch: bool = False  # config.json must say use_sliding_window
    default_window: int = 0  # for a config.json without sliding_window
    default_global: tuple[str, int] = ("", 0)  # without layer_types: key and default of n; each n-th is global
    # files may have further layers for multi-token prediction, read with `model.mtp`; config.json's key of their number
    predicts_ahead: str = ""
    defaults: tuple[tuple[str, Any], ...] = ()  # for a config.json without other keys, if not DEFAULTS
    sizes: tuple[tuple[str, int], ...] = ()  # for a config.json without these
    default_rope: tuple[tuple[str, Any], ...] = ()  # for a config.json without rope_parameters and rope_scaling
    score_architecture: str = ""  # prefix in `architectures` of a sequence classifier; empty: `architecture`
    activation_key: str = "hidden_act"  # config.json's name of the activation
    activation: str = "silu"  # of the gate, or of an MLP without one; config.json's value
    norm_key: str = "rms_norm_eps"  # config.json's name of the norms' epsilon
    rotary: bool = True  # attention has positions
    ties: bool = True  # the output layer may be the embedding
    # beginnings of names of transformers' classes -> those in files, where they differ
    stored: Names = ()
    # beginnings of names in published files -> those in files that transformers writes; with a dot: what lies within
    published: Names = ()
    offset_norms: bool = False  # norms multiply by 1 + weight
    # matrices that its files join, rows after rows: name there, names of the matrices
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # matrices that its files stack, one entry for each expert, transposed (or in MXFP4): name there, names of the
    # matrices, whose columns alternate
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    experts_stacked: bool = False  # so are those of experts: gate above up, and down, neither transposed
    root_scores: bool = False  # routers score by the square root of softplus, not by sigmoids
    clamped_gate: bool = False  # of experts, instead of SwiGLU (`ops/kernels/experts.py`)
    interleaved_rotary: bool = False  # adjacent numbers are rotated together, not halves of the head
    scaled_queries: bool = False  # by their positions: `rope_scaling.llama_4_scaling_beta`
    scaled_embeddings: bool = False  # multiplied by the square root of the hidden size
    indexer_neighbours: bool = False  # of indexers: adjacent numbers are rotated together, not halves of the head
    lists_dense: bool = False  # config.json may have mlp_layer_types in place of `MoeKeys.first_dense`
    shares_indexer: bool = False  # layers may use the choice of the layer before (config.json's indexer_types)
    plain_scores: bool = False  # queries times keys, without a factor
    value_norm: bool = False  # heads of values are normalised, without a weight
    gated_attention: bool = False  # attention's output times the sigmoid of gates, projected with the queries
    default_attention_every: int = 0  # config.json has layer_types: linear_attention, except layers n, 2n, ...
    default_local_base: float = 0.0  # rotary base of local layers; 0: they share the base
    # engines that serve it besides native and trtllm: vllm, if its logprobs were compared with transformers';
    # trtllm_engine, if the class in TensorRT-LLM was read parameter by parameter
    served_by: tuple[str, ...] = ()
    vllm_refused: str = "It was not compared with vLLM."  # why that is no engine for it
    vllm_fixed: tuple[tuple[str, Any], ...] = ()  # values of `model` that vLLM's class takes for granted
    vllm_divides_hidden: bool = False  # vLLM ignores head_dim: a head is hidden_size / num_attention_heads

    latent = _has("self_attention.kv_layernorm.weight")  # latent attention
    indexer = _has("self_attention.indexer.k_norm.weight")  # attention sees the tokens that it chooses
    entries = _has("self_attention.compressor.norm.weight")  # attention sees a window, and entries of several tokens
    hyper = _has("attention_streams.fn")  # the residual stream is several streams
    linear = _has("self_attention.conv1d.weight")  # layers without attention: `model.linear`
    mamba = _has("self_attention.D")  # of Mamba-2
    # these two in all its models, unless `varies` has it
    qk_norm = _has("self_attention.k_layernorm.weight")
    qkv_bias = _has("self_attention.linear_qkv.bias")
    output_bias = _has("self_attention.linear_proj.bias")  # if queries, keys and values have one
    sinks = _has("self_attention.sinks.weight")  # a learned score per head joins the softmax, without a value
    sigmoid_router = _has("mlp.router.expert_bias")  # experts by sigmoids and a bias, in groups, not by a softmax
    expert_bias = _has("mlp.router.bias")  # router and experts have biases
    shared_gate = _has("mlp.shared_experts.gate_weight")  # the MLP for every token is multiplied by a gate's sigmoid
    # experts stand beside the MLP of every token, both between norms of their own (`rows.BRANCH_NORMS`)
    branch_norms = _has("mlp.experts_layernorm.weight")
    dense = _has("mlp.linear_fc1.weight")  # has, or may have, layers without experts
    pre_norms = _has("input_layernorm.weight")  # inputs of attention and the MLP are normalised
    layer_scalar = _has("layer_scalar")  # a layer's output is multiplied by a number that is not trained
    # outputs of attention and the MLP are normalised before the residual stream
    post_norms = _has("self_attention.post_layernorm.weight")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(row.canonical for row in self.table)

    @property
    def trains_float32(self) -> bool:
        """Whether a bfloat16 model trains some parameters in float32."""
        return self.linear or self.hyper

    @cached_property
    def trains_ahead(self) -> bool:
        """Whether a layer for multi-token prediction is one of its layers, which training supports (`model.mtp`)."""
        return bool(self.predicts_ahead) and not (self.indexer or self.entries or self.single)

    @property
    def ahead_apart(self) -> bool:
        """Whether files name that layer apart from the others (`rows.AHEAD_APART`), and not as one behind the last."""
        return self.predicts_ahead == "mtp_num_hidden_layers"

    @cached_property
    def single(self) -> bool:
        """Whether a layer is one module (`model.pattern`), with one norm."""
        return any(row.canonical == in_layer("input_layernorm.weight") and row.kind for row in self.table)

    @cached_property
    def global_heads(self) -> bool:
        """Whether global layers have heads of another width and number."""
        return any("global" in row.kind for row in self.table)

    @cached_property
    def ungated(self) -> bool:
        """Whether an MLP has no gate."""
        return any(row.canonical.endswith("mlp.linear_fc1.weight") and row.transform == "copy" for row in self.table)

    def beside(self, ours: str, layer: int) -> str:
        """Return what the names of the row `ours` of a layer, and of its neighbours, begin with in Hugging Face's
        files."""
        name = next(row.hf[0] for row in self.table if row.canonical == in_layer(ours))
        return name.format(layer=layer).removesuffix(".weight").rpartition(".")[0] + "."

    @cached_property
    def wide_qk_norm(self) -> bool:
        """Whether queries and keys are normalised over all heads of a token, not over each."""
        return any(row.canonical.endswith("self_attention.k_layernorm.weight") and row.units for row in self.table)

    @property
    def norms(self) -> int:
        """Number of a layer's norms over the hidden size."""
        return (1 if self.single else 2) * (self.pre_norms + self.post_norms)

    @property
    def joined(self) -> bool:
        """Whether its files keep several matrices in one tensor, or have names of their own."""
        return bool(self.fused or self.stacked or self.experts_stacked or self.stored)

    @cached_property
    def varies(self) -> tuple[str, ...]:
        """Keys of `model`, besides sizes, in which two models of the family may differ."""
        moe = self.moe or MoeKeys("", "")
        beside = {
            "attention.window": self.windows,
            **dict.fromkeys(LAYERS, self.windows == "layers"),
            "attention.local_rope_base": self.default_local_base,
            "attention.nope_layers": self.nope_every,
            "attention.rotary_fraction": self.default_rotary_fraction,
            "rope_scaling.llama_4_scaling_beta": self.scaled_queries,
            "pattern": self.single,
            "indexer.shared_layers": self.shares_indexer,
            "entries.heavy_layers": self.entries,
            "linear.attention_every": self.default_attention_every,
            "linear.attention_layers": self.default_attention_every,
            "moe.dense_layers": moe.dense_layers or moe.first_dense,
            "moe.shared_ffn_hidden_size": moe.shared,
        }
        return *(key for key, _, _ in self.keys), *(key for key, present in beside.items() if present)


LONG = ("max_position_embeddings", 4096 * 32)
TIED = ("tie_word_embeddings", True)
FUSED_QKV = ("self_attn.qkv_proj", tuple(f"self_attn.{x}_proj" for x in "qkv"))
FUSED_MLP = ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
ATTENTION_BIAS: Key = ("qkv_bias", "attention_bias", False)
DELTA_NET_KEYS: tuple[Key, ...] = (
    ("linear.key_heads", "linear_num_key_heads", 16),
    ("linear.value_heads", "linear_num_value_heads", 32),
    ("linear.key_head_dim", "linear_key_head_dim", 128),
    ("linear.value_head_dim", "linear_value_head_dim", 128),
    ("linear.conv", "linear_conv_kernel_dim", 4),
)
BIAS_KEYS: tuple[Key, ...] = (ATTENTION_BIAS, ("mlp_bias", "mlp_bias", False))
