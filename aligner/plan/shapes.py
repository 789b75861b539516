"""Parameters and operations of a model, from its config.

Names: H hidden, A = heads x head_dim, K = kv_heads x head_dim, F FFN, V vocabulary, L layers; E experts of which a
token takes k, with F_e each. A multiply-add is two operations. Where some layers have experts and some one dense MLP,
numbers of "a layer" are their mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log, prod, sqrt
from operator import add
from typing import NamedTuple

from aligner.config.sections.model.config import ModelConfig
from aligner.families.matrices import is_matrix
from aligner.families.rows import BRANCH_NORMS, PREDICTS_AHEAD, SCORE_HEAD, ParamSpec
from aligner.families.table import dimensions, is_of_layer, rows_of
from aligner.plan.linear import linear_matrices, rule_operations

Kinds = tuple[str, ...]  # of a layer (`ModelConfig.layer_kinds`)


@dataclass(frozen=True)
class Grid:
    """Numbers of ranks that share models, by axis. `data` x `context` x `tensor` x `pipeline` = GPUs."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence: bool = False
    over_heads: bool = False  # context parallelism by all-to-all, else by all-gather of keys and values
    stage_layers: tuple[int, ...] = ()  # as `parallel.stage_layers`
    virtual: int = 1  # as `parallel.virtual_stages`

    @property
    def virtual_stages(self) -> int:
        return self.virtual

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def replicas(self) -> int:
        """Number of ranks with the same dense parameters."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Number of ranks with the same experts."""
        return max(1, self.tensor * self.replicas // self.expert)

    @property
    def rule_share(self) -> float:
        """Share of all tokens for which a context-parallel rank computes the rule of linear attention: where it gathers
        them, those of rows from their beginning."""
        return 1 / self.context if self.context == 1 or self.over_heads else 1 + 1 / (2 * self.context)

    def __str__(self) -> str:
        sizes = [("tp", self.tensor), ("pp", self.pipeline), ("cp", self.context), ("ep", self.expert)]
        text = " ".join(f"{name}{size}" for name, size in sizes if size > 1)
        return f"{text} dp{self.data}{' seq' if self.sequence else ''}".strip()


class Count(NamedTuple):
    """Parameters by who shares them: `dense` over the data- and context-parallel ranks, `experts` over the expert
    data-parallel ones; `score` is a scalar head, or other trained numbers that are float32 in every dtype; `fixed`,
    float32 too, and `frozen` and `integers` no gradient changes; `magnitudes`, float32 too, are shared as `experts`,
    whose adapters' they are."""

    dense: int = 0
    experts: int = 0
    score: int = 0
    fixed: int = 0
    magnitudes: int = 0
    frozen: int = 0
    integers: int = 0

    def __add__(self, other: Count) -> Count:  # type: ignore[override]
        return Count(*map(add, self, other))

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def alike(self) -> int:
        """The parameters that all data-parallel ranks hold, trained or not, of the model's dtype."""
        return self.dense + self.frozen


def attention_widths(m: ModelConfig, kinds: Kinds = ()) -> tuple[float, float, float, float]:
    """Return the numbers of a token's queries, keys, values and attention output, over all heads: in layers of these
    kinds, or on average."""
    if m.traits.global_heads and not kinds:
        each = [[share * width for width in attention_widths(m, kinds)] for kinds, share in m.head_kinds().items()]
        a, k, v, out = map(sum, zip(*each, strict=True))
        return a, k, v, out
    m = m.of_kinds(kinds)
    a, k = m.num_heads * m.kv_channels, m.num_kv_heads * m.kv_channels
    return a, k, m.num_kv_heads * m.value_channels, m.num_heads * m.value_channels


@dataclass(frozen=True, eq=False)
class _Same:
    """A model that is compared by identity: a search asks for the same one thousands of times."""

    model: ModelConfig

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.model is other.model


def stage_layers(m: ModelConfig, grid: Grid, stage: int) -> tuple[Kinds, ...]:
    """Return the kinds of each layer of a pipeline stage, with "fp8" for those whose linear layers are."""
    return _stage_layers(_Same(m), grid, stage)


@lru_cache(maxsize=1024)
def _stage_layers(same: _Same, grid: Grid, stage: int) -> tuple[Kinds, ...]:
    m = same.model
    exact = range(m.num_layers) if m.fp8_step == 1 else (0, m.num_layers - 1) if m.keeps_ends else ()
    own = [(*m.layer_kinds(layer), *["fp8"] * (layer not in exact)) for layer in m.rank_layers(grid)[stage]]
    # Megatron's block, which has FP8, has not the layer that predicts further tokens
    return (*own, *[m.layer_kinds(m.num_layers) for _ in range(_ahead(m, grid, stage))])


def _ahead(m: ModelConfig, grid: Grid, stage: int) -> int:
    """Return the layers for multi-token prediction on this stage."""
    return m.mtp.layers * (stage == grid.pipeline - 1)


def around_ahead(m: ModelConfig) -> int:
    """Return the parameters of the norms around a layer for multi-token prediction, and of the matrix before it."""
    return m.mtp.layers * m.hidden_size * (3 + 2 * m.hidden_size)


def embedding_share(m: ModelConfig, grid: Grid) -> int:
    """Return a tensor rank's elements of the embedding, which are as many of the output matrix."""
    return -(-m.vocab_size // grid.tensor) * m.hidden_size


def sent_embedding(m: ModelConfig, grid: Grid) -> int:
    """Return the elements that the last stage gets of the embedding for each step, to predict further tokens."""
    sent = m.mtp.layers and grid.pipeline > 1 and not m.tie_embeddings
    return embedding_share(m, grid) if sent else 0


def recomputed(m: ModelConfig, grid: Grid, rank: int, layers: int) -> list[bool]:
    """Return whether each layer of a pipeline's rank is recomputed: the first `layers` of each of its stages are."""
    own = [i < layers for stage in m.stages(grid)[rank :: grid.pipeline] for i in range(len(stage))]
    return own + [False] * _ahead(m, grid, rank)


def recomputes_mlp(m: ModelConfig, kinds: Kinds) -> bool:
    """Return whether backward computes the MLP, or experts, of a layer again, and nothing else of it."""
    return ("moe" if "sparse" in kinds else "mlp") in m.recomputed_modules


def mixers(kinds: Kinds) -> int:
    """Return whether a layer has attention, of either sort: 1 or 0."""
    return int("attention" in kinds or "linear" in kinds)


def attention_matrices(m: ModelConfig) -> float:
    """Count the elements that tensor ranks share: H(A + 2K) + AH, and HA of gates where a family has them; the mean
    over layers. Latent attention: the matrices that make queries, keys and values of its vectors, and the output's."""
    (a, _, v, out), latent = attention_widths(m), m.latent
    if m.traits.entries:
        return a * (latent.query_rank + latent.output_rank) + m.hidden_size * latent.output_groups * latent.output_rank
    if not latent.kv_rank:
        return m.hidden_size * (a + m.made_keys + out + a * m.traits.gated_attention)
    ups = a * (latent.query_rank or m.hidden_size) + (m.num_heads * latent.plain_dim + v) * latent.kv_rank
    return ups + m.hidden_size * out


def latent_widths(m: ModelConfig) -> list[int]:
    """Return the numbers of a token's vectors in latent attention: of queries, of keys and values, and of the rotated
    key."""
    latent = m.latent
    if m.traits.entries:
        return [latent.query_rank, m.kv_channels]
    return [latent.query_rank, latent.kv_rank, latent.rotary_dim] if latent.kv_rank else []


def entry_widths(m: ModelConfig, kinds: Kinds = ()) -> float:
    """Return the numbers of a token's vectors and gates that entries are made of, without an indexer's: in layers of
    these kinds, or on average."""
    shares = [float(kind in kinds) if kinds else m.share(kind) for kind in ("indexer", "heavy")]
    return m.kv_channels * (4 * shares[0] + 2 * shares[1]) if m.traits.entries else 0.0


def stream_matrices(m: ModelConfig) -> int:
    """Count the elements of the matrices that a layer's residual streams go through: every tensor rank has them
    whole."""
    streams = m.hyper.streams
    return 2 * streams * (streams + 2) * streams * m.hidden_size


def latent_matrices(m: ModelConfig, kinds: Kinds = ()) -> float:
    """Count the elements of the matrices that make those vectors, and entries: every tensor rank has them whole."""
    return m.hidden_size * (sum(latent_widths(m)) + entry_widths(m, kinds))


def index_matrices(m: ModelConfig) -> int:
    """Count the elements of the matrices of a layer's indexer: every tensor rank has them whole."""
    heads, d = m.indexer.heads, m.indexer.head_dim
    keys = 4 * d if m.traits.entries else d  # or the vectors and gates of which they are made
    return m.latent.query_rank * heads * d + m.hidden_size * (heads + keys)


def index_operations(m: ModelConfig, tokens: float, own: float | None = None) -> float:
    """Count the operations of one layer's indexer before its scores: queries of `tokens`, weights and keys of a rank's
    `own`. Backward has none, unless it learns."""
    queries = m.latent.query_rank * m.indexer.heads * m.indexer.head_dim
    own = tokens if own is None else own
    return 2 * m.share("indexer") * (tokens * queries + own * (index_matrices(m) - queries))


def chooses(m: ModelConfig, context: float) -> bool:
    """Return whether indexers choose, or learn, in rows whose tokens see `context` tokens on average, half the row."""
    return bool(m.indexer.heads) and (m.indexer.loss > 0 or 2 * context > m.indexer.top_k)


def router_matrix(m: ModelConfig) -> int:
    """Count the elements of a router: HE."""
    return m.hidden_size * m.moe.num_experts


def router_parameters(m: ModelConfig, kinds: Kinds) -> int:
    """Count what a layer's router learns: its matrix, and in some families a number or two for each expert."""
    each = m.traits.expert_bias + m.traits.branch_norms
    return ("sparse" in kinds) * (router_matrix(m) + each * m.moe.num_experts)


def shared_matrices(m: ModelConfig) -> int:
    """Count the elements of the MLP for every token beside the experts, without its gate."""
    return (1 + m.mlp_parts) * m.hidden_size * m.moe.shared_ffn_hidden_size


def expert_inputs(m: ModelConfig) -> list[int]:
    """Return the width of what experts see, if it is not what their router sees."""
    return [m.expert_hidden] if m.moe.latent_size or m.traits.branch_norms else []


def expert_latents(m: ModelConfig) -> int:
    """Count the elements of the two matrices to and from the width of experts, if it is their own."""
    return 2 * m.hidden_size * m.moe.latent_size


def mlp_width(m: ModelConfig, kinds: Kinds, tensor: int = 1) -> int:
    """Return the numbers that a token has between the matrices of an MLP on all of an engine's `tensor` ranks, each of
    which has memory for all of the token's experts that it may have."""
    if "sparse" in kinds:
        return min(tensor * m.moe.top_k, m.moe.num_experts) * m.expert_ffn + m.moe.shared_ffn_hidden_size
    return m.ffn_of(kinds) if "dense" in kinds else 0


def widest_mlp(m: ModelConfig, tensor: int = 1) -> int:
    return max(mlp_width(m, kinds, tensor) for kinds in set(stage_layers(m, Grid(), 0)))


def input_matrices(m: ModelConfig) -> int:
    """Count the elements of the matrices of a layer's input: the two around it, and its share of the projection."""
    return 3 * m.hidden_size * m.layer_input_size


def inputs_width(m: ModelConfig) -> int:
    """Return the numbers that a token gives all layers beside the stream."""
    return m.num_layers * m.layer_input_size


def _mean_mlp(m: ModelConfig) -> float:
    """Count the elements that every token of a layer meets behind attention: 3HF of a dense MLP (2HF without a gate),
    or those beside experts, and those of the layer's input; the mean over layers."""
    experts = m.share("sparse") * (router_matrix(m) + shared_matrices(m) + expert_latents(m))
    return experts + (1 + m.mlp_parts) * m.hidden_size * m.mean_ffn + input_matrices(m)


def recomputed_share(m: ModelConfig) -> float:
    """Return the share of the layers' products that MLPs and experts compute again by themselves."""
    each = (1 + m.mlp_parts) * m.moe.top_k * m.expert_hidden * m.expert_ffn
    experts = m.share("sparse") * (router_matrix(m) + shared_matrices(m) + expert_latents(m) + each)
    dense = (1 + m.mlp_parts) * m.hidden_size * m.mean_ffn
    again = dense * ("mlp" in m.recomputed_modules) + experts * ("moe" in m.recomputed_modules)
    return again / (attention_matrices(m) + dense + experts)


def layer_norms(m: ModelConfig, kinds: Kinds = ("attention",)) -> int:
    """Count the elements of a layer of these kinds that every tensor rank holds alike and that sequence parallelism
    computes on shares of the tokens. They are norms, biases that are added like them, the matrices of latent
    attention's vectors, to and from experts, and of the layer's input, and the gate of the MLP for every token."""
    biases, traits = m.output_bias + m.mlp_bias, m.traits  # of projections into the residual stream
    biases += traits.shared_gate
    biases += ("sparse" in kinds) * traits.branch_norms * (len(BRANCH_NORMS) - 1)  # one stands for the norm before
    each_head = m.qk_norm and not traits.wide_qk_norm and "attention" in kinds
    biases += bool(m.layer_input_size)  # the norm of what it adds
    heads = head_norms(m, kinds) if each_head else 0
    latent = 2 * m.hidden_size * m.layer_input_size
    latent += m.latent.query_rank + (m.kv_channels if traits.entries else m.latent.kv_rank)
    latent += latent_matrices(m, kinds) + ("sparse" in kinds) * expert_latents(m)
    if traits.hyper:
        latent += stream_matrices(m) + 2 * (m.hyper.streams * (m.hyper.streams + 2) + 3)
    return (traits.norms + biases) * m.hidden_size + heads + latent


def head_norms(m: ModelConfig, kinds: Kinds) -> int:
    """Count the elements of the norms of each head's queries and keys in layers of these kinds."""
    return (1 + (m.kv_matrices(kinds) > 0)) * m.of_kinds(kinds).kv_channels


def end_norms(m: ModelConfig, grid: Grid, stage: int) -> int:
    """Count the elements outside of layers that every tensor rank holds alike: the last norm, and the projection, with
    its norm, that makes layers' inputs of embeddings."""
    inputs = (m.num_layers * m.hidden_size + 1) * m.layer_input_size
    return m.hidden_size * (stage == grid.pipeline - 1) + inputs * (stage == 0)


def rank_parameters(m: ModelConfig, grid: Grid, stage: int, head: str = "lm", outputs: int = 1) -> Count:
    """Count the parameters of one rank on pipeline stage `stage`, by the family's rows. The vocabulary, padded to a
    multiple of tp, is on the first stage and again on the last (once where tied and pp = 1)."""
    return _rank_count(_Same(m), grid, stage, head, outputs)


@lru_cache(maxsize=1024)
def _rank_count(same: _Same, grid: Grid, stage: int, head: str, outputs: int) -> Count:
    m, total = same.model, Counter[str]()
    for row, number, elements in _rank_rows(m, grid, stage, head, outputs):
        total[_holders(row, m)] += number * elements
    return Count(**total)


def largest_parameter(m: ModelConfig, grid: Grid, stage: int, head: str = "lm") -> int:
    """Return the elements of one rank's largest parameter."""
    return max(elements for _, number, elements in _rank_rows(m, grid, stage, head) if number)


def matrix_parameters(m: ModelConfig, grid: Grid, stage: int) -> tuple[int, int]:
    """Return the elements of one rank's matrices of layers, and those of the largest parameter of these on all tensor
    ranks."""
    rows = [(row, n, size) for row, n, size in _rank_rows(m, grid, stage, "lm") if is_matrix(row) and n]
    whole = (size * (grid.tensor if row.tp_axis is not None and not row.experts else 1) for row, _, size in rows)
    return sum(n * size for _, n, size in rows), max(whole, default=0)


def _rank_rows(
    m: ModelConfig, grid: Grid, stage: int, head: str, outputs: int = 1
) -> Iterator[tuple[ParamSpec, int, int]]:
    """Yield each row of the family, how often a rank has it, and its elements there."""
    last = stage == grid.pipeline - 1
    layers = Counter(stage_layers(m, grid, stage))
    sizes = {kinds: dimensions(m.of_kinds(kinds), outputs) for kinds in (*layers, ())}
    beside = PREDICTS_AHEAD if m.mtp.layers and head == "lm" else ()
    for row in (*rows_of(m, head), *beside):
        if is_of_layer(row):
            times = {kinds: number for kinds, number in layers.items() if row.is_in(kinds)}
        else:
            here = last if not row.canonical.startswith("embedding.") else stage == 0
            times = {(): int(here or (row.padded and last and head == "lm" and m.tie_embeddings))}
        for kinds, number in times.items():
            yield row, number, _rank_elements(row, sizes[kinds], grid)


def _holders(row: ParamSpec, m: ModelConfig) -> str:
    """Return the field of `Count` for the row."""
    if row.experts:
        return "experts"
    if row.integer:
        return "integers"
    if row.float32 and (row.frozen or row.canonical.endswith("expert_bias")):
        return "fixed"
    if row.frozen and not (row.kind == "indexer" and m.indexer.loss):
        return "frozen"
    return "score" if row.hf == SCORE_HEAD.hf or row.float32 else "dense"


def engine_grid(m: ModelConfig, tensor: int, shares: int = 1) -> Grid:
    """Return the grid of one engine, whose tensor ranks share whole experts. `shares`: see `Engine`."""
    return Grid(tensor // shares, expert=tensor if m.moe.num_experts else 1)


def _rank_elements(row: ParamSpec, sizes: dict[str, int], grid: Grid) -> int:
    shape = [sizes[name] for name in row.shape]
    elements, groups = prod(shape), sizes["groups"]
    if row.units == "groups" and groups < grid.tensor:  # each rank of an engine has a key's head and a value's
        repeated = len(row.hf) - (row.transform != "copy")
        elements += (grid.tensor - groups) * repeated * sizes["head"] * (elements // shape[0])
    if row.padded:
        return -(-shape[0] // grid.tensor) * shape[1]
    if row.experts:
        return elements // shape[0] * -(-shape[0] // grid.expert)
    return elements // (1 if row.tp_axis is None else grid.tensor)


def layer_operations(m: ModelConfig, tokens: float, context: float, kept: float | None = None) -> float:
    """Count the operations of one layer's forward pass over `tokens` that see `context` tokens each on average (causal:
    half the row), without experts' own (`expert_operations`).

    They are 2 x matrix elements, and 4 A x context for scores and their sum over values. `kept`: only queries, keys and
    values are made of the other tokens, 2 H (A + 2K); `context` is that of the kept ones. Each kind of layer counts by
    its share of all."""
    a, _, _, out = attention_widths(m)
    kept = tokens if kept is None else kept
    mixed = attention_matrices(m) - m.hidden_size * out + latent_matrices(m)
    attention = 2 * tokens * mixed + kept * (2 * m.hidden_size * out + 2 * (a + out) * context)
    into, onto = linear_matrices(m)
    mixing = 2 * tokens * stream_matrices(m)
    remembers = 2 * tokens * into + 2 * kept * onto + rule_operations(m, tokens)
    return m.share("attention") * attention + m.share("linear") * remembers + 2 * kept * _mean_mlp(m) + mixing


def expert_operations(m: ModelConfig, tokens: float) -> float:
    """Count the operations of one layer's experts: 6 k H F_e a token, 4 without gates; H of their own."""
    return 2.0 * (1 + m.mlp_parts) * tokens * m.share("sparse") * m.moe.top_k * m.expert_hidden * m.expert_ffn


def ahead_operations(m: ModelConfig, tokens: float) -> float:
    """Count the operations in front of the layer for multi-token prediction: of its one matrix, which every tensor rank
    has whole."""
    return 4.0 * m.mtp.layers * tokens * m.hidden_size**2


def head_operations(m: ModelConfig, tokens: float, head: str = "lm", outputs: int = 1, tensor: int = 1) -> float:
    """Count the operations on one tensor rank: its share of the padded vocabulary, or a scalar head, which is whole on
    each."""
    return 2.0 * tokens * m.hidden_size * (-(-m.vocab_size // tensor) if head == "lm" else outputs)


def active_parameters(m: ModelConfig) -> int:
    """Count the parameters that a token is multiplied with: the N of 6 N operations a trained token. The embedding is a
    look-up."""
    layer = layer_operations(m, 1, 0) + index_operations(m, 1) + expert_operations(m, 1)
    return round((m.num_layers * layer + head_operations(m, 1)) / 2)


def routing_bytes(m: ModelConfig) -> int:
    """Return the bytes of a token's expert numbers in all layers (`ops/packing/routing.py`)."""
    return len(m.layers_of("sparse")) * m.moe.top_k * (1 if m.moe.num_experts <= 256 else 2)


def kv_bytes(m: ModelConfig, element: int, tensor: int = 1) -> float:
    """Return the bytes of keys and values of one position, or of the vectors latent attention keeps, on one of an
    engine's `tensor` ranks. Each has a head at least."""
    width = float(m.latent.kv_rank + m.latent.rotary_dim + m.indexer.head_dim)
    if m.traits.entries:  # of a token, and of the entry that ends with it
        width = 2.0 * m.kv_channels + m.indexer.head_dim
    elif not m.latent.kv_rank:
        kinds = ((m.of_kinds(kinds), share) for kinds, share in m.head_kinds().items() if m.kv_matrices(kinds))
        width = sum(
            share * max(1.0, each.num_kv_heads / tensor) * (each.kv_channels + each.value_channels)
            for each, share in kinds
        )
    return (len(m.layers_of("attention")) + m.mtp.layers) * width * element


def decode_weight_bytes(
    m: ModelConfig, rows: float, element: int, tensor: int = 1, matrix: float = 0.0, shares: int = 1
) -> float:
    """Return the bytes that one of an engine's `tensor` ranks reads in one decode step over `rows` rows. Of E experts,
    rows that choose evenly touch E (1 - (1 - k/E)^rows), and of the rank that has most a few more: its number is about
    normal. The embedding and the table of inputs are look-ups. `matrix`, `shares`: see `Engine`."""
    count, moe = rank_parameters(m, engine_grid(m, tensor, shares), 0), m.moe
    untouched = 0.0
    if moe.num_experts:
        share = (1 - moe.top_k / moe.num_experts) ** rows
        ahead = sqrt(2 * log(tensor) * share * (1 - share) * tensor / moe.num_experts)
        untouched = count.experts * max(0.0, share - ahead)
    looked_up = (0 if m.tie_embeddings else m.hidden_size) + inputs_width(m)
    words = -(-m.vocab_size * shares // tensor)
    head, body = words * m.hidden_size, count.total - untouched - words * (looked_up + m.hidden_size)
    return element * head + (matrix or element) * body
