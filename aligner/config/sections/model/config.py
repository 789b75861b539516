"""The section `model`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

from aligner.config.checks import AUTO, Switch
from aligner.config.key import REFUSE, REPORT, Section, key, section
from aligner.config.megatron_fields import check_fields
from aligner.config.rule import rules
from aligner.config.sections.model.attention import AttentionConfig, ScalesConfig, check_layers
from aligner.config.sections.model.entries import EntriesConfig
from aligner.config.sections.model.hyper import HyperConfig
from aligner.config.sections.model.indexer import IndexerConfig, check_indexer
from aligner.config.sections.model.kernels import KERNELS, unfit_for_varlen
from aligner.config.sections.model.latent import LatentConfig
from aligner.config.sections.model.linear import LinearConfig, check_linear
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.sections.model.moe import MoeConfig, check_dense_layers
from aligner.config.sections.model.mtp import MtpConfig
from aligner.config.sections.model.rope import RopeScalingConfig, check_rope
from aligner.config.sections.model.stages import LayoutSizes, cut
from aligner.errors import ConfigError
from aligner.families import FAMILIES, load_family
from aligner.families.family import LAYERS, Family

# keys that the run decides, whatever folder the weights come from
OF_THE_RUN = ("dtype", "recompute", "kernels", "varlen_attention", "tokenizer", "init", "lora", "mtp", "megatron")
MOE_OF_THE_RUN = ("aux_coef", "aux_over")
PATTERN = {"M": "linear", "*": "attention", "-": "dense", "E": "sparse"}  # `model.pattern` -> kind of a layer
# all keys of `model` that are the run's; the others are of its shape
RUNS = (*OF_THE_RUN, *(f"moe.{name}" for name in MOE_OF_THE_RUN), "indexer.loss", "rope_scaling.factors", "init_std")


def _counts_layers(recompute: str) -> bool:
    return recompute in ("none", "full") or (recompute.isascii() and recompute.isdigit() and int(recompute) > 0)


@dataclass
class ModelConfig(Section, key="model"):
    family: str = key(
        "llama",
        "Model family: `model_type` of config.json (docs/how-to/models.md).",
        choices=tuple(FAMILIES),
        named="Family",
    )
    num_layers: int = key(4, "Decoder layers.", least=1)
    pattern: str = key(
        "",
        "Kinds of layers that are one module each, in order: M (linear), * (attention), - (MLP), E (experts). Empty: "
        "a layer is attention and an MLP.",
    )
    hidden_size: int = key(128, "Width of the residual stream.", least=1)
    ffn_hidden_size: int = key(384, "Width of the MLP.", least=1)
    double_mlp: bool = key(False, "The MLP is twice as wide in layers without keys and values of their own.")
    layer_input_size: int = key(0, "Numbers that a token gives each layer by a table of their own. 0: none.", least=0)
    num_heads: int = key(4, "Query heads.", least=1)
    num_kv_heads: int = key(4, "Heads of keys and values. It must divide num_heads.", least=1)
    head_dim: int = key(0, "Width of a head. 0: hidden_size / num_heads.", least=0)
    vocab_size: int = key(0, "Rows of the embedding. 0: the tokenizer's size.", least=0)
    rope_base: float = key(10000.0, "Base of the rotary frequencies.", above=0)
    norm_eps: float = key(1e-6, "Epsilon of RMSNorm.")
    max_position: int = key(4096, "Maximum tokens of a row.", least=1)
    tie_embeddings: bool = key(True, "Use the embedding as the output layer.")
    qk_norm: bool = key(False, "Normalise queries and keys.")
    qkv_bias: bool = key(False, "Biases of queries, keys and values. In most such families also after attention.")
    mlp_bias: bool = key(False, "Biases in the MLP.")
    rope_scaling: RopeScalingConfig = section(RopeScalingConfig)
    attention: AttentionConfig = section(AttentionConfig)
    latent: LatentConfig = section(LatentConfig)
    indexer: IndexerConfig = section(IndexerConfig)
    entries: EntriesConfig = section(EntriesConfig)
    hyper: HyperConfig = section(HyperConfig)
    linear: LinearConfig = section(LinearConfig)
    scales: ScalesConfig = section(ScalesConfig)
    moe: MoeConfig = section(MoeConfig)
    mtp: MtpConfig = section(MtpConfig)
    lora: LoraConfig = section(LoraConfig)
    init_std: float = key(0.02, "Standard deviation of random weights.", resume=REFUSE)
    init: str = key("random", "Source of the weights: random, a Hugging Face folder, a run folder, or a checkpoint.")
    tokenizer: str = key("", "Hugging Face tokenizer folder. Empty: the one in `model.init`.")
    dtype: str = key("auto", "Data type of computation.", choices=("auto", "float32", "bfloat16"), resume=REPORT)
    recompute: str = key(
        "none",
        "Layers whose activations are recomputed in the backward pass: none, full (all), or how many of each stage.",
        valid=(_counts_layers, "none, full or a number above 0"),
        resume=REPORT,
    )
    kernels: str = key(
        "auto",
        "Modules of the model: own, te (TransformerEngine), or invariant: the native engine and the trainer compute "
        "the same bits (`mismatch.expect`). auto: on a GPU those of te that it has, if it loads.",
        choices=KERNELS,
        resume=REPORT,
    )
    varlen_attention: Switch = key(
        AUTO,
        "Compute attention of rows of any length in one call, without padding and masks. auto: on a GPU that supports "
        "the model, without te.",
        auto=True,
        resume=REPORT,
    )
    megatron: dict[str, Any] = key({}, "Fields of Megatron-Core's TransformerConfig by name.", resume=REPORT)

    WORDS = MappingProxyType(
        {
            "latent.head_dim": "0, or model.latent.plain_dim + rotary_dim = {latent.head_dim}",
            "moe.reachable": "the {moe.reachable} experts of a token's groups",
        }
    )
    RULES = rules(
        """
traits.moe !traits.moe.switch !pattern => moe.num_experts >=1 | with model.family={family}
!traits.moe moe.num_experts => family | one of $MOE with model.moe.num_experts={moe.num_experts}
traits.moe !traits.moe.norm_topk_prob => moe.norm_topk_prob =true | for model.family={family}
traits.shared_gate => moe.shared_ffn_hidden_size >=1 | with model.family={family}
traits.branch_norms moe.num_experts => moe.shared_ffn_hidden_size ==ffn_hidden_size | for model.family={family}
traits.sigmoid_router => moe.num_experts %moe.groups | , at least 2 in each
traits.sigmoid_router moe.num_experts moe.of_group<2 => moe.num_experts
    | a multiple of model.moe.groups={moe.groups}, at least 2 in each
traits.sigmoid_router => moe.top_groups <=moe.groups
traits.sigmoid_router moe.num_experts => moe.top_k <=moe.reachable
traits.sigmoid_router moe.num_experts => moe.ffn_hidden_size, moe.shared_ffn_hidden_size >=1
    | for model.family={family}
traits.moe traits.moe.shared => moe.shared_ffn_hidden_size %moe.ffn_hidden_size | for model.family={family}
traits.sigmoid_router !moe.dense_first => moe.dense_layers | the first layers for model.family={family}
traits.latent => latent.kv_rank, latent.plain_dim, latent.rotary_dim, latent.value_dim >=1
    | for model.family={family}
traits.latent => latent.rotary_dim %2
traits.latent => num_kv_heads ==num_heads | with latent attention, which makes a key of each head
traits.latent head_dim => head_dim ==latent.head_dim
traits.indexer => indexer.heads, latent.query_rank >=1 | for model.family={family}
lora.rank indexer.loss => indexer.loss =0 | with model.lora.rank={lora.rank}: only adapters are trained
traits.indexer => indexer.head_dim >=latent.rotary_dim
lora.rank => mtp.layers =0 | with model.lora.rank={lora.rank}: only adapters are trained
traits.entries => entries.tokens, hyper.streams, indexer.heads, latent.query_rank, latent.output_groups,
    latent.output_rank, attention.window >=1 | for model.family={family}
traits.entries => attention.local_rope_base, moe.gate_limit >0 | for model.family={family}
traits.entries => num_kv_heads =1 | for model.family={family}, whose heads share one
traits.entries => num_heads %latent.output_groups
traits.entries => indexer.loss =0 | for model.family={family}, whose indexers are not trained
traits.entries => moe.hash_layers <=num_layers
traits.linear !pattern => linear.key_heads >=1 | with model.family={family}
!traits.ties => tie_embeddings =false | for model.family={family}
traits.scaled_queries => rope_scaling.type =yarn | for model.family={family}
traits.global_heads => rope_scaling.type =proportional | for model.family={family}
!traits.global_heads rope_scaling.type=proportional => family | one of $GLOBAL with model.rope_scaling.type=proportional
traits.global_heads => attention.global_head_dim >=1 | for model.family={family}
traits.global_heads => attention.global_head_dim %2
traits.global_heads => attention.local_rope_base >0 | for model.family={family}
attention.global_kv_heads => attention.global_kv_heads /num_heads
attention.own_values => attention.global_kv_heads =0 | without model.attention.key_is_value
moe.num_experts => double_mlp =false | with experts, whose layers have MLPs of one width
traits.mamba => linear.rule =mamba2 | for model.family={family}
!traits.mamba => linear.rule =delta | for model.family={family}
=> num_kv_heads /num_heads
!head_dim !latent.kv_rank => hidden_size %num_heads | , or head_dim
megatron.recompute_modules => recompute =none | with model.megatron.recompute_modules
traits.single or traits.hyper => megatron.recompute_modules off | for model.family={family}, whose layers are others
megatron.recompute_modules~mlp !dense => megatron.recompute_modules | moe alone: all layers have experts
megatron.recompute_modules~moe => moe.num_experts >=1 | with moe in model.megatron.recompute_modules
megatron.fp8 => megatron.fp8_recipe =tensorwise|blockwise|mxfp8
    | with model.megatron.fp8. Megatron's default, delayed, would reduce scales over all ranks at each step
megatron.fp8_recipe or megatron.first_last_layers_bf16 => megatron.fp8 =e4m3|hybrid | with fields of FP8
megatron.fp8 => moe.num_experts, linear.key_heads =0
    | with model.megatron.fp8: products of experts and of linear attention are not all TransformerEngine's
megatron.tp_comm_overlap_ag or megatron.tp_comm_overlap_rs or megatron.tp_comm_bootstrap_backend
    => megatron.tp_comm_overlap =true | with fields of it
megatron.tp_comm_overlap => moe.num_experts, linear.key_heads =0
    | with model.megatron.tp_comm_overlap: TransformerEngine has buffers for attention and MLPs of dense models
megatron.tp_comm_overlap => hidden_size %32 | with model.megatron.tp_comm_overlap, whose kernels send so many
megatron.tp_comm_overlap megatron.fp8 => megatron.fp8_recipe =tensorwise|mxfp8
    | with model.megatron.tp_comm_overlap: TransformerEngine's buffers hold no blocks
""",
        MOE=[name for name, family in FAMILIES.items() if family.moe],
        GLOBAL=[name for name, family in FAMILIES.items() if family.global_heads],
    )

    def __post_init__(self) -> None:
        check_fields("model", self.megatron)
        super().__post_init__()
        check_traits(self)
        check_pattern(self)
        check_layers(self.attention, self.num_layers)
        check_dense_layers(self.moe, self.num_layers)
        check_linear(self)
        check_indexer(self.indexer, self.num_layers)
        check_entries(self)
        check_rope(self.rope_scaling, self.rotary_dim)

    @property
    def traits(self) -> Family:
        """Properties of all models of its family. Until the folder of `init` is read, whose shape is not here, a
        family of the user's counts as llama, the default."""
        if self.family in FAMILIES:
            return FAMILIES[self.family]
        family = load_family(self.family)
        return family if self.init == "random" or self.vocab_size else FAMILIES["llama"]

    @property
    def kv_channels(self) -> int:
        """Numbers of a head of queries, and of keys."""
        return self.head_dim or self.latent.head_dim or self.hidden_size // self.num_heads

    @property
    def value_channels(self) -> int:
        """Numbers of a head of values."""
        return self.latent.value_dim or self.kv_channels

    @property
    def latent_queries(self) -> bool:
        return self.latent.query_rank > 0

    @property
    def direct_queries(self) -> bool:
        return not self.latent_queries

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated, or would be at another frequency than 0."""
        if self.rope_scaling.type == "proportional":
            return self.kv_channels
        return self.latent.rotary_dim or int(self.kv_channels * self.attention.rotary_fraction)

    @property
    def output_bias(self) -> bool:
        return self.qkv_bias and self.traits.output_bias

    @property
    def expert_ffn(self) -> int:
        return self.moe.ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert_hidden(self) -> int:
        """Width of an expert's input and output."""
        return self.moe.latent_size or self.hidden_size

    @property
    def query_heads(self) -> int:
        """Heads that the queries' product makes: queries and, in some families, their gates."""
        return self.num_heads * (2 if self.traits.gated_attention else 1)

    @property
    def queries_per_group(self) -> int:
        """Heads that the queries' product makes for each of keys."""
        return self.query_heads // self.num_kv_heads

    @property
    def recomputed(self) -> int:
        """The layers of each pipeline stage that are recomputed, the first ones; all if there are fewer."""
        return {"none": 0, "full": self.num_layers}[self.recompute] if self.recompute.isalpha() else int(self.recompute)

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Modules of each layer that are recomputed alone."""
        return tuple(self.megatron.get("recompute_modules") or ())

    @property
    def fp8_step(self) -> int:
        """The number of which FP8 products take multiples of tokens and widths; 1 without."""
        return (32 if self.megatron["fp8_recipe"] == "mxfp8" else 16) if self.megatron.get("fp8") else 1

    @property
    def keeps_ends(self) -> bool:
        """Whether with FP8 the first and the last layer stay bfloat16."""
        return bool(self.megatron.get("first_last_layers_bf16"))

    @property
    def invariant(self) -> bool:
        return self.kernels == "invariant"

    @property
    def varlen_on_gpu(self) -> bool:
        """Whether attention takes rows of any length on a GPU: TransformerEngine's, or by `varlen_attention`."""
        fits = not (self.dtype == "float32" or unfit_for_varlen(self))
        return self.kernels == "te" or (fits if self.varlen_attention == AUTO else bool(self.varlen_attention))

    def layer_kinds(self, layer: int) -> tuple[str, ...]:
        """Return the kinds of layer 0, 1, ...: it has the rows of the family's table that are of one of them, or of
        none. Its MLP: "dense", or "sparse" with experts. Before it: "attention", or "linear". Its heads: `heads_of`.
        With an indexer: "indexer". With entries: `entries_of`, and how experts are chosen, "hashed" or "scored". With
        `pattern` one of them alone."""
        if self.pattern:
            return (PATTERN[self.pattern[layer]],)
        sparse = self.moe.num_experts and layer not in self.moe.dense_layers
        linear = layer < self.num_layers and self.linear.is_linear(layer)  # the one that predicts further never is
        kinds = "sparse" if sparse else "dense", "linear" if linear else "attention"
        if self.entries.tokens:
            return (*kinds, *self.entries_of(layer), "hashed" if layer < self.moe.hash_layers else "scored")
        return (*kinds, *self.heads_of(layer), *["indexer"] * self.indexer.is_full(layer))

    def entries_of(self, layer: int) -> tuple[str, ...]:
        """Return what layer 0, 1, ... sees besides its window: entries that an indexer chooses, or heavy ones."""
        if self.attention.is_local(layer):
            return ()
        return "entries", "heavy" if layer in self.entries.heavy_layers else "indexer"

    def entry_tokens(self, layer: int) -> int:
        """Return the tokens of an entry in layer 0, 1, ...; 0: it has none."""
        kinds = self.entries_of(layer)
        return (self.entries.heavy_tokens if "heavy" in kinds else self.entries.tokens) if kinds else 0

    def heads_of(self, layer: int) -> tuple[str, ...]:
        """Return whose heads layer 0, 1, ... has, "local" or "global", and whether it has keys and values of its own:
        "keys" or "reads". Return nothing if all layers of the family have the same."""
        if not self.traits.global_heads:
            return ()
        return "local" if self.attention.is_local(layer) else "global", "keys" if self.has_keys(layer) else "reads"

    def has_keys(self, layer: int) -> bool:
        """Return whether layer 0, 1, ... has keys and values of its own."""
        return layer < self.num_layers - self.attention.kv_shared_layers

    def keys_of(self, layer: int) -> int:
        """Return the layer whose keys and values this layer uses."""
        if self.has_keys(layer):
            return layer
        local = self.attention.is_local(layer)
        return max(n for n in range(layer) if self.has_keys(n) and self.attention.is_local(n) == local)

    def lends_keys(self, layer: int) -> bool:
        """Return whether later layers use the keys and values of this one."""
        shared = range(self.num_layers - self.attention.kv_shared_layers, self.num_layers)
        return any(self.keys_of(later) == layer for later in shared if later > layer)

    def of_kinds(self, kinds: tuple[str, ...]) -> ModelConfig:
        """Return the model with the heads and the MLP of layers of these kinds in all layers."""
        attention, sizes = self.attention, dict[str, int]()
        if "global" in kinds:
            heads = attention.global_kv_heads or self.num_kv_heads
            sizes = {"head_dim": attention.global_head_dim, "num_kv_heads": heads}
        if self.ffn_of(kinds) != self.ffn_hidden_size:
            sizes["ffn_hidden_size"] = self.ffn_of(kinds)
        return replace(self, **sizes) if sizes else self

    def ffn_of(self, kinds: tuple[str, ...]) -> int:
        """Return the width of the MLP in layers of these kinds."""
        return self.ffn_hidden_size * (2 if self.double_mlp and "reads" in kinds else 1)

    def head_kinds(self) -> dict[tuple[str, ...], float]:
        """Return kinds of layers with the same heads -> their share of the layers with attention."""
        if not self.traits.global_heads:
            return {("attention",): 1.0}
        counts = Counter(map(self.heads_of, range(self.num_layers)))
        return {kinds: count / self.num_layers for kinds, count in counts.items()}

    def kv_matrices(self, kinds: tuple[str, ...]) -> int:
        """Return whether layers of these kinds have matrices of keys and of values: 2, of keys alone: 1, or none."""
        if "reads" in kinds:
            return 0
        return 2 if self.attention.own_values or "global" not in kinds else 1

    def layers_of(self, kind: str) -> tuple[int, ...]:
        return self._layers.get(kind, ())

    @cached_property
    def _layers(self) -> dict[str, tuple[int, ...]]:
        """Kind -> its layers. A plan asks a million times, and a section does not change once it is made."""
        kinds = [self.layer_kinds(layer) for layer in range(self.num_layers)]
        return {kind: tuple(layer for layer, its in enumerate(kinds) if kind in its) for kind in set(chain(*kinds))}

    def stages(self, layout: LayoutSizes) -> tuple[range, ...]:
        """Return the layers of each stage of a pipeline."""
        count, sizes = layout.pipeline * layout.virtual_stages, tuple(layout.stage_layers)
        return cut(self.num_layers, count, sizes, tuple(self.indexer.shared_layers))

    def rank_layers(self, layout: LayoutSizes) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each rank of a pipeline, which takes every so many-th stage."""
        stages = self.stages(layout)
        return tuple(tuple(chain(*stages[rank :: layout.pipeline])) for rank in range(layout.pipeline))

    @cached_property
    def mean_ffn(self) -> float:
        """The width of the MLP, 0 in layers without one for every token; the mean over layers."""
        return sum(self.ffn_of(self.layer_kinds(layer)) for layer in self.layers_of("dense")) / self.num_layers

    @property
    def made_keys(self) -> float:
        """Numbers of a token's keys and values that a layer has matrices for; the mean over layers."""
        each = ((share, self.kv_matrices(kinds), self.of_kinds(kinds)) for kinds, share in self.head_kinds().items())
        return sum(share * count * m.num_kv_heads * m.kv_channels for share, count, m in each)

    def share(self, kind: str) -> float:
        """Return the share of layers of this kind."""
        return len(self.layers_of(kind)) / self.num_layers

    def is_rotated(self, layer: int) -> bool:
        return self.traits.rotary and layer not in self.attention.nope_layers

    @property
    def passes_beside(self) -> bool:
        """Whether layers get more from earlier ones than the residual stream."""
        return bool(self.layer_input_size or self.attention.kv_shared_layers)

    @property
    def narrows(self) -> bool:
        """Whether the last layer may leave out tokens whose output nobody reads: it mixes tokens, and has no experts,
        which are balanced by every token."""
        last = self.layer_kinds(self.num_layers - 1)
        return not self.moe.num_experts and ("attention" in last or "linear" in last)

    @property
    def mlp_parts(self) -> int:
        """Matrices of an MLP that read its input: gate and up, or one."""
        return 1 if self.traits.ungated else 2

    @property
    def dense(self) -> bool:
        """Whether a layer has an MLP for every token."""
        return bool(self.layers_of("dense"))

    @property
    def mixed_layers(self) -> bool:
        """Whether not all layers have the same parameters."""
        return len({self.layer_kinds(layer) for layer in range(self.num_layers)}) > 1


def for_run(shape: ModelConfig, run: ModelConfig) -> ModelConfig:
    """Return a folder's shape, with the keys that the run decides."""
    moe = replace(shape.moe, **{name: getattr(run.moe, name) for name in MOE_OF_THE_RUN})
    rope = replace(shape.rope_scaling, factors=run.rope_scaling.factors)
    indexer = replace(shape.indexer, loss=run.indexer.loss if shape.indexer.heads else 0.0)
    return replace(
        shape, moe=moe, indexer=indexer, rope_scaling=rope, **{name: getattr(run, name) for name in OF_THE_RUN}
    )


def beside(run: ModelConfig) -> ModelConfig:
    """Return what other models of a run take of its policy: not the tokenizer, nor fields of Megatron, which fit one
    shape. Scores and targets are not rounded to FP8."""
    return replace(run, tokenizer="", megatron={}, mtp=MtpConfig())


def generating(model: ModelConfig, drafts: bool = False) -> ModelConfig:
    """Return the model of engines, and of models that do not learn: without layers that predict further tokens, unless
    an engine `drafts` with them (`engine.draft_tokens`)."""
    return replace(model, mtp=MtpConfig()) if model.mtp.layers and not drafts else model


def with_ahead(model: ModelConfig) -> ModelConfig:
    """Return the model whose last layer is the one that predicts further tokens."""
    linear, own = model.linear, [model.num_layers] if model.linear.key_heads else []
    linear = replace(linear, attention_layers=linear.attention_layers + own)
    return replace(generating(model), num_layers=model.num_layers + 1, linear=linear)


def check_traits(model: ModelConfig) -> None:
    """Check that the model has no key that its family lacks. Raises ConfigError."""
    varies = model.traits.varies
    for name, value, plain in unusual(model):
        if name not in varies:
            having = ", ".join(family for family, its in FAMILIES.items() if name in its.varies)
            raise ConfigError(f"model.{name}", value, f"{plain} with model.family={model.family}: {having} have it")
    window = model.attention.window
    if model.traits.global_heads and model.attention.is_local(model.num_layers - 1):
        expected = f"layer {model.num_layers - 1}, the last, among the global ones for model.family={model.family}"
        raise ConfigError("model.attention.global_layers", model.attention.global_layers, expected)
    if "attention.local_rope_base" in varies and not window:
        raise ConfigError("model.attention.window", 0, f"at least 1 for model.family={model.family}")
    for name in LAYERS:
        value = getattr(model.attention, name.removeprefix("attention."))
        if value and not window:
            raise ConfigError(f"model.{name}", value, "none without model.attention.window")


def check_entries(model: ModelConfig) -> None:
    """Check which layers have heavy entries, and what of a head is rotated. Raises ConfigError."""
    if not model.traits.entries:
        return
    heavy, most = model.entries.heavy_layers, model.indexer.head_dim
    wrong = [n for n in heavy if not 0 <= n < model.num_layers or model.attention.is_local(n)]
    if wrong or sorted(set(heavy)) != heavy:
        expected = "global layers (model.attention.global_layers and global_every), ascending"
        raise ConfigError("model.entries.heavy_layers", wrong or heavy, expected)
    if model.rotary_dim % 2 or not 0 < model.rotary_dim <= most:
        expected = f"an even number of {model.kv_channels}, at most model.indexer.head_dim={most}"
        raise ConfigError("model.attention.rotary_fraction", model.attention.rotary_fraction, expected)


def check_pattern(model: ModelConfig) -> None:
    """Check the pattern of a family whose layers are one module each. Raises ConfigError."""
    pattern = model.pattern
    if not model.traits.single:
        return
    if len(pattern) != model.num_layers or set(pattern) - set(PATTERN) or "*" not in pattern:
        expected = f"one of {' '.join(PATTERN)} for each of model.num_layers={model.num_layers} layers, * among them"
        raise ConfigError("model.pattern", pattern, expected)
    for letter, name, count in (
        ("M", "linear.key_heads", model.linear.key_heads),
        ("E", "moe.num_experts", model.moe.num_experts),
    ):
        if (letter in pattern) != (count > 0):
            expected = "at least 1" if letter in pattern else "0"
            raise ConfigError(f"model.{name}", count, f"{expected} with model.pattern={pattern}")


# keys and sections that most models leave as they are, with their plain values
OPTIONAL = {"mlp_bias": False, "pattern": "", "double_mlp": False, "layer_input_size": 0}
SECTIONS = {"attention": AttentionConfig, "latent": LatentConfig, "indexer": IndexerConfig, "linear": LinearConfig}
SECTIONS |= {"entries": EntriesConfig, "hyper": HyperConfig, "scales": ScalesConfig}


def unusual(model: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return (key, value, value in a plain model) of optional keys that differ from a plain model's."""
    entries: list[tuple[str, Any, Any]] = [(name, getattr(model, name), plain) for name, plain in OPTIONAL.items()]
    entries.append(("rope_scaling.llama_4_scaling_beta", model.rope_scaling.llama_4_scaling_beta, 0.0))
    moe = {"dense_layers": [], "shared_ffn_hidden_size": 0, "latent_size": 0, "groups": 1, "top_groups": 1}
    moe |= {"scale": 1.0, "hash_layers": 0, "gate_limit": 0.0}
    entries += [(f"moe.{name}", getattr(model.moe, name), plain) for name, plain in moe.items()]
    for name, kind in SECTIONS.items():
        values, defaults = asdict(getattr(model, name)), asdict(kind())
        if name == "linear":
            defaults["rule"] = values["rule"]  # which the family decides
        entries += [(f"{name}.{key}", values[key], defaults[key]) for key in values if f"{name}.{key}" not in RUNS]
    return [(name, value, plain) for name, value, plain in entries if value != plain]
