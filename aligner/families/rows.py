"""The rows that families consist of: parameters with Megatron's `GPTModel` names and Hugging Face's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

Transform = Literal["copy", "qkv", "qkv_bias", "linear_in", "gate_up", "experts_gate_up", "experts"]


@dataclass(frozen=True)
class ParamSpec:
    """One canonical parameter.

    In a family's table names carry `{layer}`, those of experts in Hugging Face's files also `{expert}`, and sizes are
    names of `dimensions`.
    """

    canonical: str
    hf: tuple[str, ...]
    transform: Transform
    tp_axis: int | None  # None: replicated over tensor-parallel ranks
    shape: tuple = ()  # of the canonical tensor
    units: int | str = 0  # indivisible pieces along tp_axis: heads, query groups, rows
    repeats: bool = False  # an engine's ranks beyond the units repeat them: heads of keys and values
    padded: bool = False  # the vocabulary: split pads it to a multiple of TP, merge cuts it to `units`
    experts: bool = False  # axis 0 is the expert; expert-parallel ranks have equal shares of it
    when: str = ""  # in a family's table: models with this flag of ModelConfig have it; empty: all
    float32: bool = False  # in any model dtype
    integer: bool = False  # int64 in any model dtype
    frozen: bool = False  # no gradient changes it
    kind: str = ""  # in a family's table: kinds that its layers have (`ModelConfig.layer_kinds`); empty: all layers

    def is_in(self, kinds: Collection[str]) -> bool:
        """Return whether layers of these kinds have it."""
        return set(self.kind.split()) <= set(kinds)


def in_layer(name: str) -> str:
    """Return the canonical name of a row from its name within the layer."""
    return f"decoder.layers.{{layer}}.{name}"


def layer(
    ours: str,
    hf: str | tuple[str, ...],
    shape: str,
    axis: int | None = None,
    units: int | str = 0,
    transform: Transform = "copy",
    **fields: Any,
) -> ParamSpec:
    """Return a row of every decoder layer: names within the layer, sizes by their names in `dimensions`."""
    names = (hf,) if isinstance(hf, str) else hf
    hf_names = tuple(f"model.layers.{{layer}}.{name}" for name in names)
    return ParamSpec(in_layer(ours), hf_names, transform, axis, tuple(shape.split()), units, **fields)


def experts(block: str, gate: str, up: str, down: str, router: str = "gate") -> tuple[ParamSpec, ...]:
    """Return the rows of a layer of experts by its names in Hugging Face's files. `gate` may be empty: they have
    none."""
    at = f"{block}.experts.{{expert}}."
    both, each = tuple(f"{at}{name}.weight" for name in (gate, up) if name), {"experts": True, "kind": "sparse"}
    units, outer = "expert_ffn", "experts expert_hidden expert_ffn"
    inner = f"experts {len(both)} expert_ffn expert_hidden"
    return (
        layer("mlp.router.weight", f"{block}.{router}.weight", "experts hidden", kind="sparse"),
        layer("mlp.experts.gate_up", both, inner, 2, units, "experts_gate_up", **each),
        layer("mlp.experts.down", f"{at}{down}.weight", outer, 2, units, "experts", **each),
    )


def expert_biases(block: str, gate: str, up: str, down: str, router: str) -> tuple[ParamSpec, ...]:
    at = f"{block}.experts.{{expert}}."
    both, each = (f"{at}{gate}.bias", f"{at}{up}.bias"), {"experts": True, "kind": "sparse"}
    fc1, fc2 = (f"mlp.experts.linear_fc{i}.bias" for i in (1, 2))
    return (
        layer("mlp.router.bias", f"{block}.{router}.bias", "experts", kind="sparse"),
        layer(fc1, both, "experts 2 expert_ffn", 2, "expert_ffn", "experts_gate_up", **each),
        layer(fc2, f"{at}{down}.bias", "experts hidden", transform="experts", **each),
    )


def sigmoid_router(block: str, shared: str, gated: bool = True) -> tuple[ParamSpec, ...]:
    """Return the rows besides `experts` of a router with a bias, and of the MLP for every token, `gated` or not."""
    bias = f"{block}.gate.e_score_correction_bias"
    router = layer("mlp.router.expert_bias", bias, "experts", float32=True, kind="sparse")
    return router, *shared_expert(block, shared, gated=gated)


def shared_expert(block: str, shared: str, gate: str = "", gated: bool = True) -> tuple[ParamSpec, ...]:
    """Return the rows of the MLP for every token, `gated` or not, and, if it has a name, of the gate of its
    output."""
    at, ours, units = f"{block}.{shared}.", "mlp.shared_experts.", "shared_ffn"
    both = f"{at}gate_proj.weight", f"{at}up_proj.weight"
    first = (both, "2shared_ffn hidden", 0, units, "gate_up") if gated else (both[1], "shared_ffn hidden", 0, units)
    rows = (
        layer(ours + "gate_weight", f"{block}.{gate}.weight", "1 hidden", kind="sparse"),
        layer(ours + "linear_fc1.weight", *first, kind="sparse"),
        layer(ours + "linear_fc2.weight", f"{at}down_proj.weight", "hidden shared_ffn", 1, units, kind="sparse"),
    )
    return rows if gate else rows[1:]


def norms(**names: str) -> tuple[ParamSpec, ...]:
    """Return the common rows with these norms instead of the usual two, by their names in Hugging Face's files.

    They are `before` and `behind` attention, `before_mlp`, `behind_mlp`. Families use one name for different norms.
    """
    canonical = {
        "before": "input_layernorm",
        "before_mlp": "pre_mlp_layernorm",
        "behind": "self_attention.post_layernorm",
        "behind_mlp": "mlp.post_layernorm",
    }
    others = tuple(row for row in COMMON if "{layer}" not in row.canonical or "layernorm" not in row.canonical)
    return others + tuple(layer(f"{canonical[at]}.weight", f"{hf}.weight", "hidden") for at, hf in names.items())


def in_attention_layers(rows: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    """Return the rows, with those of attention restricted to layers that have it."""
    return tuple(replace(row, kind="attention") if ".self_attention." in row.canonical else row for row in rows)


_QKV = tuple(f"self_attn.{name}_proj." for name in "qkv")
_GATE_UP = "mlp.gate_proj.", "mlp.up_proj."


def _named(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(name + kind for name in names)


COMMON = (
    ParamSpec(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        "copy",
        0,
        ("vocab", "hidden"),
        "vocab",
        padded=True,
    ),
    layer("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    layer("self_attention.linear_qkv.weight", _named(_QKV, "weight"), "qkv hidden", 0, "groups", "qkv"),
    layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden context", 1, "heads"),
    layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    ParamSpec("decoder.final_layernorm.weight", ("model.norm.weight",), "copy", None, ("hidden",)),
)
MLP = (
    layer("mlp.linear_fc1.weight", _named(_GATE_UP, "weight"), "2ffn hidden", 0, "ffn", "gate_up", kind="dense"),
    layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden ffn", 1, "ffn", kind="dense"),
)
# of families whose global layers have heads of their own, which may have no matrix of values, and whose last layers may
# use the keys and values of others
GLOBAL_QKV = tuple(
    layer(
        "self_attention.linear_qkv.weight",
        _named(_QKV[:count], "weight"),
        f"{'qkv'[:count]} hidden",
        0,
        "groups" if count > 1 else "heads",
        "qkv",
        kind=kind,
        when=when,
    )
    for count, kind, when in (
        (3, "local keys", ""),
        (3, "global keys", "attention.own_values"),
        (2, "global keys", "attention.key_is_value"),
        (1, "reads", ""),
    )
)
# norms of what the router, the experts and the MLP beside them see, and of what the latter two compute
BRANCH_NORMS = (
    "router_layernorm",
    "experts_layernorm",
    "shared_layernorm",
    "experts_post_layernorm",
    "shared_post_layernorm",
)
LAYER_SCALAR = layer("layer_scalar", "layer_scalar", "1", frozen=True)
QKV_BIAS = (
    layer("self_attention.linear_qkv.bias", _named(_QKV, "bias"), "qkv", 0, "groups", "qkv_bias", when="qkv_bias"),
)
BIASES = (
    *QKV_BIAS,
    layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "hidden", when="output_bias"),
)
MLP_BIASES = (
    layer("mlp.linear_fc1.bias", _named(_GATE_UP, "bias"), "2ffn", 0, "ffn", "gate_up", when="mlp_bias"),
    layer("mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden", when="mlp_bias"),
)
QK_NORM = tuple(
    layer(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", "head", when="qk_norm") for x in "qk"
)
WIDE_QK_NORM = tuple(
    layer(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", size, 0, units)
    for x, size, units in (("q", "q", "heads"), ("k", "kv", "groups"))
)
KEYS_QK_NORM = (QK_NORM[0], replace(QK_NORM[1], kind="keys"))
# what a token gives each layer (Gemma 3n's per-layer embeddings)
_GIVES = {"when": "layer_input_size"}
LAYER_INPUTS = (
    ParamSpec(
        "embedding.layer_inputs.table.weight",
        ("model.embed_tokens_per_layer.weight",),
        "copy",
        0,
        ("vocab", "layer_inputs"),
        "vocab",
        padded=True,
        **_GIVES,
    ),
    ParamSpec(
        "embedding.layer_inputs.projection.weight",
        ("model.per_layer_model_projection.weight",),
        "copy",
        None,
        ("layer_inputs", "hidden"),
        **_GIVES,
    ),
    ParamSpec(
        "embedding.layer_inputs.norm.weight",
        ("model.per_layer_projection_norm.weight",),
        "copy",
        None,
        ("layer_input",),
        **_GIVES,
    ),
    layer("layer_input.gate.weight", "per_layer_input_gate.weight", "layer_input hidden", **_GIVES),
    layer("layer_input.projection.weight", "per_layer_projection.weight", "hidden layer_input", **_GIVES),
    layer("layer_input.post_layernorm.weight", "post_per_layer_input_norm.weight", "hidden", **_GIVES),
)
SINKS = layer("self_attention.sinks.weight", "self_attn.sinks", "heads", 0, "heads")


def _latent(ours: str, hf: str, shape: str, units: str = "", when: str = "") -> ParamSpec:
    """Return a row of latent attention. `units` is empty if every tensor rank holds it whole."""
    names = f"self_attention.{ours}.weight", f"self_attn.{hf}.weight"
    return layer(*names, shape, 0 if units else None, units or 0, when=when)


# Megatron's names (`MLASelfAttention`)
LATENT = (
    *(row for row in COMMON if "linear_qkv" not in row.canonical),
    _latent("linear_q_proj", "q_proj", "q hidden", "heads", when="direct_queries"),
    _latent("linear_q_down_proj", "q_a_proj", "q_rank hidden", when="latent_queries"),
    _latent("q_layernorm", "q_a_layernorm", "q_rank", when="latent_queries"),
    _latent("linear_q_up_proj", "q_b_proj", "q q_rank", "heads", when="latent_queries"),
    _latent("linear_kv_down_proj", "kv_a_proj_with_mqa", "kv_rank+rotary hidden"),
    _latent("kv_layernorm", "kv_a_layernorm", "kv_rank"),
    _latent("linear_kv_up_proj", "kv_b_proj", "plain+value kv_rank", "heads"),
)


def _index(ours: str, hf: str, shape: str) -> ParamSpec:
    return layer(f"self_attention.indexer.{ours}", f"self_attn.indexer.{hf}", shape, kind="indexer", frozen=True)


# Megatron's names (`DSAIndexer`)
INDEXED = (
    *LATENT,
    _index("linear_wq_b.weight", "wq_b.weight", "index_q q_rank"),
    _index("linear_wk.weight", "wk.weight", "index_head hidden"),
    _index("k_norm.weight", "k_norm.weight", "index_head"),
    _index("k_norm.bias", "k_norm.bias", "index_head"),
    _index("linear_weights_proj.weight", "weights_proj.weight", "index_heads hidden"),
)


# of linear layers: how fast a state is forgotten, which tokens multiply; vLLM and files of Qwen3.5 have it in float32
DECAY = "A_log"


def _linear(ours: str, hf: tuple[str, ...], shape: str, *where: Any) -> ParamSpec:
    names = tuple(f"linear_attn.{name}" for name in hf)
    return layer(f"self_attention.{ours}", names, shape, *where, kind="linear", float32=ours == DECAY)


def delta_net(*inputs: str) -> tuple[ParamSpec, ...]:
    """Return the rows of a gated delta rule. `inputs`: names of its input projections, in the order that a head of keys
    has them (`rows_of_group`)."""
    names = tuple(f"in_proj_{name}.weight" for name in inputs)
    return _linear("in_proj.weight", names, "linear_in hidden", 0, "key_heads", "linear_in"), *_DELTA_NET


_DELTA_NET = (
    # whole on every tensor rank: its queries, keys and values are not adjacent
    _linear("conv1d.weight", ("conv1d.weight",), "linear_mixed 1 conv"),
    _linear("A_log", ("A_log",), "value_heads", 0, "key_heads"),
    _linear("dt_bias", ("dt_bias",), "value_heads", 0, "key_heads"),
    _linear("out_norm.weight", ("norm.weight",), "value_head"),
    _linear("out_proj.weight", ("out_proj.weight",), "hidden linear_out", 1, "key_heads"),
)


def _ahead(ours: str, hf: str, *shape: str) -> ParamSpec:
    return ParamSpec(f"{AHEAD}{ours}.weight", (f"model.layers.{{layer}}.{hf}.weight",), "copy", None, shape)


# of a layer for multi-token prediction, which has the rows of a layer as well
AHEAD, AHEAD_LAYER = "ahead.", "ahead.layer."
PREDICTS_AHEAD = (
    _ahead("enorm", "enorm", "hidden"),
    _ahead("hnorm", "hnorm", "hidden"),
    _ahead("eh_proj", "eh_proj", "hidden", "2hidden"),
    _ahead("final_layernorm", "shared_head.norm", "hidden"),
)
# in files that have such a layer apart from the others: the names of these rows, and the beginning of the layer's own
AHEAD_APART = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}
AHEAD_LAYER_APART = "mtp.layers.0."
LM_HEAD = ParamSpec("output_layer.weight", ("lm_head.weight",), "copy", 0, ("vocab", "hidden"), "vocab", padded=True)
SCORE_HEAD = ParamSpec("output_layer.weight", ("score.weight",), "copy", None, ("labels", "hidden"), float32=True)
