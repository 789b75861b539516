"""Bytes of collectives, by the axis of ranks they go over. `tests/plan` compares them with what Megatron's ranks send.

`size` is that of the whole tensor of one call: all-reduce its input, all-gather its output, reduce-scatter its input,
all-to-all a rank's input, send and broadcast the message. On the wire a rank of p sends, by the ring algorithms,
(p - 1) / p of it. An all-reduce sends twice that (Patarasuk & Yuan 2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import ceil, log2

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.kernels import NEAR
from aligner.config.sections.model.moe import MoeConfig
from aligner.families.table import end_table, layer_table
from aligner.plan.adapters import (
    adapter_calls,
    is_adapted,
    needs_no_input_gradient,
    sent_bytes,
    trained_parameters,
    whole_numbers,
)
from aligner.plan.devices import Device, Prices
from aligner.plan.job import PlanJob, PlannedModel
from aligner.plan.linear import gathered_width, linear_alike
from aligner.plan.muon import gathered_numbers
from aligner.plan.reads import reads
from aligner.plan.shapes import (
    Grid,
    Kinds,
    around_ahead,
    attention_widths,
    embedding_share,
    end_norms,
    entry_widths,
    expert_inputs,
    head_norms,
    index_matrices,
    latent_widths,
    layer_norms,
    mixers,
    rank_parameters,
    recomputed,
    recomputes_mlp,
    router_matrix,
    router_parameters,
    sent_embedding,
    stage_layers,
)
from aligner.plan.sizes import filled_together

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class CollectiveCalls:
    """`count` collectives that move `size` bytes in all."""

    axis: str  # tp, pp, cp, dp (data and context), ep, edp (ranks with the same experts), ends (first and last stage)
    op: str
    size: float
    count: float = 1
    moe: MoeConfig | None = None  # of an all-to-all of tokens: who chooses the ranks that a token goes to

    def wire(self, ranks: int) -> float:
        """Return the bytes that one rank sends."""
        share = (ranks - 1) / ranks
        return self.size * {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0}.get(self.op, share)


def message_seconds(call: CollectiveCalls, ranks: int, here: int, device: Device, prices: Prices) -> float:
    """Return the seconds of a call over `ranks`, of which `here` are in a node. In a ring as many network adapters of a
    node work as it has members there; in an all-to-all a rank uses NVLink and its adapter at the same time. Tokens go
    once to each node, and then to its ranks. Each doubling of nodes adds a message's latency."""
    wire, nvlink, network = call.wire(ranks), device.nvlink, device.network
    if here == ranks:
        took = wire / nvlink
    elif call.op == "all_to_all":
        nodes, near = ranks / here, call.size * (here - 1) / ranks / nvlink
        took = max(near, call.size * (1 - 1 / nodes) / network)
        if call.moe is not None:
            far = call.size * call.moe.reached(nodes) / call.moe.reached(ranks)
            took = far * (1 - 1 / nodes) / network + near * nodes
    else:
        took = wire / (network if call.op == "send" else min(nvlink, here * network))
    hops = 1 if call.op == "send" else 1 + log2(ranks / here)
    return took / prices.link + call.count * prices.message_s * hops


def axis_size(grid: Grid, axis: str) -> int:
    return {
        "tp": grid.tensor,
        "pp": grid.pipeline,
        "cp": grid.context,
        "dp": grid.replicas,
        "ep": grid.expert,
        "edp": grid.expert_replicas,
        "ends": 2 if grid.pipeline > 1 else 1,
    }[axis]


def axis_stride(grid: Grid, axis: str) -> int:
    """Return how many ranks apart neighbours of the group are. Ranks are numbered tensor, context, data, pipeline, the
    fastest first."""
    tp = grid.tensor
    stage = tp * grid.replicas
    strides = {"tp": 1, "cp": tp, "ep": 1, "dp": tp, "edp": grid.expert, "pp": stage}
    return strides.get(axis, stage * (grid.pipeline - 1))


def within(calls: Iterable[CollectiveCalls], grid: Grid) -> list[CollectiveCalls]:
    """Return the calls without those of axes that have one rank."""
    return [call for call in calls if axis_size(grid, call.axis) > 1 and call.size]


def layer_forward(
    model: PlannedModel, grid: Grid, tokens: float, kept: float, element: int, kinds: Kinds
) -> Iterator[CollectiveCalls]:
    """Yield the calls of one layer of these kinds for `tokens` of all context-parallel ranks, `kept` of them whole
    (`plan.reads`).

    Tensor parallelism sums the outputs of attention and MLP (Megatron-LM, arXiv:1909.08053). Sequence parallelism
    scatters them and gathers the inputs (arXiv:2205.05198), but for experts, who get each tensor rank's own tokens.
    What FP8 products read is gathered in FP8."""
    m, own, each = model.shape, tokens / grid.context, kept / grid.context * element
    read = each / element if "fp8" in kinds else each
    inputs, outputs = [*_inputs(m, kinds), *_mlp_inputs(m, grid, kinds)], _outputs(m, grid, kinds)
    if grid.sequence:
        index = [m.latent.query_rank, m.indexer.heads, m.indexer.head_dim] if "indexer" in kinds else []
        if m.traits.entries:  # vectors and gates, of entries and of what the indexer compares
            index = [
                *index[:2],
                *[4 * m.indexer.head_dim] * bool(index),
                *[entry_widths(m, kinds)] * ("entries" in kinds),
            ]
        yield CollectiveCalls("tp", "all_gather", sum(inputs + index) * read, len(inputs + index))
        yield CollectiveCalls("tp", "reduce_scatter", sum(outputs) * each, len(outputs))
    else:
        yield CollectiveCalls("tp", "all_reduce", sum(outputs) * each, len(outputs))
    yield from _context(model, grid, tokens, element, kinds, backward=False)
    if "sparse" in kinds:
        yield _experts(model, grid, own, element)
    if is_adapted(model):
        for op, size in adapter_calls(model, grid, own, kept / grid.context, element, kinds)[0]:
            yield CollectiveCalls("tp", op, size)


def frozen_backward(
    model: PlannedModel, grid: Grid, tokens: float, kept: float, element: int, kinds: Kinds, first: bool
) -> Iterator[CollectiveCalls]:
    """Yield the calls of `layer_backward` where only adapters are trained: no gradients of weights, and none of the
    `first` layer's input."""
    m, own = model.shape, tokens / grid.context
    each, last, outputs = own * element, kept / grid.context * element, _outputs(m, grid, kinds)
    mlps = _mlp_inputs(m, grid, kinds)
    inputs = _inputs(m, kinds)[1 if first and not m.latent.query_rank else 0 :]
    if grid.sequence:
        yield CollectiveCalls("tp", "all_gather", sum(outputs) * (own if "fp8" in kinds else each), len(outputs))
        yield CollectiveCalls("tp", "reduce_scatter", sum(inputs + mlps) * each, len(inputs + mlps))
    else:
        yield CollectiveCalls("tp", "all_reduce", sum(inputs) * each + sum(mlps) * last, len(inputs + mlps))
    yield from _context(model, grid, tokens, element, kinds, backward=True)
    if "sparse" in kinds:
        yield _experts(model, grid, own, element)
    for op, size in adapter_calls(model, grid, own, kept / grid.context, element, kinds)[1]:
        yield CollectiveCalls("tp", op, size)


def layer_backward(
    model: PlannedModel, grid: Grid, tokens: float, kept: float, element: int, kinds: Kinds
) -> Iterator[CollectiveCalls]:
    """Yield the calls for the gradients of the same. With sequence parallelism the inputs of the two column-parallel
    products are gathered a second time for the gradients of their weights."""
    m, own, sparse = model.shape, tokens / grid.context, "sparse" in kinds
    each, last, inputs = own * element, kept / grid.context * element, _inputs(m, kinds)
    mlps = _mlp_inputs(m, grid, kinds)
    if grid.sequence:
        # the rotated key, or that of all heads, goes through no product
        gathered = [*_outputs(m, grid, kinds), *inputs[: 1 if m.traits.entries else 2], *mlps]
        yield CollectiveCalls("tp", "all_gather", sum(gathered) * (own if "fp8" in kinds else each), len(gathered))
        yield CollectiveCalls("tp", "reduce_scatter", sum(inputs + mlps) * each, len(inputs + mlps))
    else:
        yield CollectiveCalls("tp", "all_reduce", sum(inputs) * each + sum(mlps) * last, len(inputs + mlps))
        if sparse:  # of the router; its numbers for each expert, in some families, weigh nothing
            copies = 1 + m.traits.expert_bias + m.traits.branch_norms
            yield CollectiveCalls("tp", "all_reduce", router_matrix(m) * element, copies)
    if "linear" in kinds:  # of the mixing's weight, and the norm's or the mixing's bias
        yield CollectiveCalls("tp", "all_reduce", linear_alike(m) * element, 2)
    yield from _context(model, grid, tokens, element, kinds, backward=True)
    if sparse:
        yield _experts(model, grid, own, element)


def _inputs(m: ModelConfig, kinds: Kinds) -> list[int]:
    """Return the widths of the inputs of attention's column-parallel products, each with a collective of its own."""
    if not mixers(kinds):
        return []
    if not latent_widths(m):
        return [m.hidden_size]
    query, *others = latent_widths(m)
    return [query or m.hidden_size, *others]


def _mlp_inputs(m: ModelConfig, grid: Grid, kinds: Kinds) -> list[int]:
    """Return the widths of the inputs of a layer's MLPs that tensor ranks share: the router's and the experts', which
    may be one, before that of the MLP for every token."""
    if "sparse" not in kinds:
        return [m.hidden_size] * ("dense" in kinds)
    alone = [] if grid.sequence else [m.hidden_size, *expert_inputs(m)]
    return [*alone, *[m.hidden_size] * bool(m.moe.shared_ffn_hidden_size)]


def _outputs(m: ModelConfig, grid: Grid, kinds: Kinds) -> list[int]:
    """Return the widths of the sums over tensor ranks: of attention and MLPs."""
    outputs = [m.hidden_size] * (mixers(kinds) + ("dense" in kinds))
    if "sparse" in kinds:
        alone = [] if grid.sequence else [m.expert_hidden]
        outputs += [*alone, *[m.hidden_size] * bool(m.moe.shared_ffn_hidden_size)]
    return outputs


def _context(
    model: PlannedModel, grid: Grid, tokens: float, element: int, kinds: Kinds, backward: bool
) -> Iterator[CollectiveCalls]:
    """Yield calls that send keys and values to all ranks, or their gradients back; or queries, keys, values and the
    output over heads."""
    m = model.shape
    if "linear" in kinds:
        yield from _linear_context(model, grid, tokens, element, backward)
    if "attention" not in kinds:
        return
    if "indexer" in kinds and (m.indexer.loss or not backward):  # keys; over heads queries and their weights too
        heads, d = m.indexer.heads, m.indexer.head_dim
        size = d * element + grid.over_heads * heads * (d * element + 4)
        op = "reduce_scatter" if backward else "all_gather"
        yield CollectiveCalls("cp", op, tokens * size, 1 + 2 * grid.over_heads)
    a, k, v, out = (width / grid.tensor for width in attention_widths(m, kinds))
    if m.traits.entries:  # every tensor rank has them
        k, v = attention_widths(m, kinds)[1], entry_widths(m, kinds)
    if grid.over_heads:
        yield CollectiveCalls("cp", "all_to_all", tokens / grid.context * (a + k + v + out) * element, 4)
    else:
        yield CollectiveCalls("cp", "reduce_scatter" if backward else "all_gather", tokens * (k + v) * element)


def _linear_context(
    model: PlannedModel, grid: Grid, tokens: float, element: int, backward: bool
) -> Iterator[CollectiveCalls]:
    """Yield calls that send the projections to all ranks, or their gradients back; or they and the output over
    heads."""
    m, width = model.shape, gathered_width(model.shape) / grid.tensor
    if grid.over_heads:
        out = m.linear.value_heads * m.linear.value_head_dim / grid.tensor
        yield CollectiveCalls("cp", "all_to_all", tokens / grid.context * (width + out) * element, 2)
    else:
        yield CollectiveCalls("cp", "reduce_scatter" if backward else "all_gather", tokens * width * element)


def _experts(model: PlannedModel, grid: Grid, own: float, element: int) -> CollectiveCalls:
    """Return the calls that send each token once to each rank with one of its experts, and one sum back from there.
    Weights and numbers of its experts go with it, float32."""
    m, moe = model.shape, model.shape.moe
    rows = own * moe.reached(grid.expert) / grid.tensor
    return CollectiveCalls("ep", "all_to_all", rows * (2 * m.expert_hidden * element + 8 * moe.top_k), 3, moe)


def _sum(layers: Iterable[Iterable[CollectiveCalls]]) -> list[CollectiveCalls]:
    """Merge calls of one axis and operation into one call, of any sizes."""
    by_key: dict[tuple[str, str], list[CollectiveCalls]] = {}
    for call in chain.from_iterable(layers):
        by_key.setdefault((call.axis, call.op), []).append(call)
    return [
        CollectiveCalls(*key, sum(c.size for c in calls), sum(c.count for c in calls), calls[0].moe)
        for key, calls in by_key.items()
    ]


def pass_calls(job: PlanJob, model: PlannedModel, stage: int, tokens: float, backward: bool) -> list[CollectiveCalls]:
    """Return the calls of one micro-batch of `tokens` through stage `stage`: forward, and backward if `backward`."""
    grid, m, e = job.grid, model.shape, job.element
    own, layers, last = tokens / grid.context, stage_layers(m, grid, stage), stage == grid.pipeline - 1
    hidden = own * m.hidden_size * e
    looked_up = hidden + own * m.num_layers * m.layer_input_size * e
    passed = hidden * max(1, m.hyper.streams)  # between stages
    read, (each, again) = reads(job, model, tokens), _computed(job, model, stage, tokens)
    forward = each + again * backward
    calls = _sum(layer_forward(model, grid, tokens, k, e, kinds) for k, kinds in forward)
    if backward and is_adapted(model):
        free = needs_no_input_gradient(m, grid, stage, job.recompute)
        calls += _sum(
            frozen_backward(model, grid, tokens, k, e, kinds, free and i == 0) for i, (k, kinds) in enumerate(each)
        )
    elif backward:
        calls += _sum(layer_backward(model, grid, tokens, k, e, kinds) for k, kinds in each)
    if backward and m.indexer.loss:  # what the heads of all ranks weigh, float32, and again in backward
        count = 2 * sum("indexer" in kinds for kinds in layers)
        size = 4 * count * (tokens if grid.over_heads else own) * min(2 * job.rows.context, job.rows.longest)
        calls += [CollectiveCalls(axis, "all_reduce", size, count) for axis in ("tp", *["cp"] * grid.over_heads)]
    if stage == 0:
        calls.append(CollectiveCalls("tp", "reduce_scatter" if grid.sequence else "all_reduce", looked_up))
        if backward and grid.sequence and not is_adapted(model):
            calls.append(CollectiveCalls("tp", "all_gather", looked_up))
    if last:
        calls += _head(model, grid, read.kept / grid.context * m.hidden_size * e, backward)
        if m.mtp.layers and backward:
            calls += _ahead(model, grid, hidden, read.pairs / grid.context)
        # of what is read logprob and, where one is trained, entropy: a maximum and sums over shares of the vocabulary
        numbers = 2 if backward else 1
        if model.head == "lm":
            calls.append(CollectiveCalls("tp", "all_reduce", 4 * read.pairs / grid.context * (2 + numbers), 2))
        calls.append(CollectiveCalls("cp", "all_reduce", 4 * tokens * (numbers if model.head == "lm" else 1)))
    else:
        calls.append(CollectiveCalls("pp", "send", passed / (grid.tensor if grid.sequence else 1)))
    if stage > 0 and backward:
        calls.append(CollectiveCalls("pp", "send", passed / (grid.tensor if grid.sequence else 1)))
    return within(calls, grid)


def _computed(job: PlanJob, model: PlannedModel, stage: int, tokens: float) -> tuple[list, list]:
    """Return (tokens, kinds) of each layer of a stage, and of what backward computes again."""
    grid, m, layers = job.grid, model.shape, stage_layers(model.shape, job.grid, stage)
    kept = [tokens] * len(layers)
    if stage == grid.pipeline - 1:
        kept[-1] = reads(job, model, tokens).kept
    each = list(zip(kept, layers, strict=True))
    again = [x for x, twice in zip(each, recomputed(m, grid, stage, job.recompute), strict=True) if twice]
    alone = [(k, tuple({*kinds} - {"attention", "linear"})) for k, kinds in each if recomputes_mlp(m, kinds)]
    return each, again + alone


def buffered_calls(job: PlanJob, model: PlannedModel, stage: int, tokens: float) -> list[CollectiveCalls]:
    """Return those of a trained micro-batch that go beside products (`megatron/user_buffers.py`): inputs and sums of
    the forward pass, gradients of the sums. There are none of a micro-batch much smaller than the buffers."""
    m, grid = model.shape, job.grid
    if not m.megatron.get("tp_comm_overlap") or not job.micro_tokens or tokens < NEAR * job.micro_tokens:
        return []
    calls, (each, again) = list[CollectiveCalls](), _computed(job, model, stage, tokens)
    for number, (kept, kinds) in enumerate(each + again):
        inputs, outputs = [*_inputs(m, kinds), *_mlp_inputs(m, grid, kinds)], _outputs(m, grid, kinds)
        gathered = inputs + outputs * (number < len(each))
        own, element = kept / grid.context, 1 if "fp8" in kinds else job.element
        calls.append(CollectiveCalls("tp", "all_gather", sum(gathered) * own * element, len(gathered)))
        calls.append(CollectiveCalls("tp", "reduce_scatter", sum(outputs) * own * job.element, len(outputs)))
    return within(_sum([calls]), grid)


def _head(model: PlannedModel, grid: Grid, hidden: float, backward: bool) -> Iterator[CollectiveCalls]:
    """Yield the calls of a head. Hidden states are gathered for either head. Gradients of a language-model head are
    summed, as every rank has a share of the vocabulary."""
    if grid.sequence:
        yield CollectiveCalls("tp", "all_gather", hidden)
    if backward and model.head == "lm":
        yield CollectiveCalls("tp", "reduce_scatter" if grid.sequence else "all_reduce", hidden)


def _ahead(model: PlannedModel, grid: Grid, hidden: float, pairs: float) -> Iterator[CollectiveCalls]:
    """Yield the calls around a layer for multi-token prediction: next tokens are looked up, and others predicted. Of
    each: a logprob (three numbers) and whether it is the likeliest (two)."""
    yield CollectiveCalls("tp", "reduce_scatter" if grid.sequence else "all_reduce", hidden)
    if grid.sequence and not model.shape.mtp.detach:
        yield CollectiveCalls("tp", "all_gather", hidden)
    yield from _head(model, grid, hidden, backward=True)
    yield CollectiveCalls("tp", "all_reduce", 4 * pairs * 5, 2)


def step_calls(job: PlanJob, model: PlannedModel, stage: int) -> list[CollectiveCalls]:
    """Return the calls that an optimizer step adds to its micro-batches: gradients over ranks with the same
    parameters. With the distributed optimizer they are scattered, and the new parameters gathered."""
    grid, m, e = job.grid, model.shape, job.element
    count = trained_parameters(model, grid, stage)
    calls: list[CollectiveCalls] = []
    for axis, dense, score in (("dp", count.dense, count.score), ("edp", count.experts, count.magnitudes)):
        if model.distributed:
            calls.append(CollectiveCalls(axis, "reduce_scatter", float(model.gradient * dense + 4 * score)))
            # with experts Megatron has two optimizers, and after the step of each gathers the parameters of both
            times = 2 if count.experts else 1
            calls.append(CollectiveCalls(axis, "all_gather", times * float(e * dense + 4 * score), times))
        else:
            calls.append(CollectiveCalls(axis, "all_reduce", float(model.gradient * dense + 4 * score)))
    if model.muon:
        numbers, matrices = gathered_numbers(m, grid, stage)
        calls.append(CollectiveCalls("tp", "all_gather", 4 * numbers, matrices))
    layers = stage_layers(m, grid, stage)
    if is_adapted(model):
        if grid.sequence:
            calls.append(CollectiveCalls("tp", "all_reduce", 4.0 * whole_numbers(model, grid, stage)))
        return within(calls, grid)
    if grid.sequence:
        norms = sum(layer_norms(m, kinds) for kinds in layers) + end_norms(m, grid, stage)
        if m.indexer.loss:  # of what sees a rank's own tokens
            each = (m.indexer.heads + m.indexer.head_dim) * m.hidden_size + 2 * m.indexer.head_dim
            norms += each * sum("indexer" in kinds for kinds in layers)
        norms += sum(router_parameters(m, kinds) for kinds in layers)
        norms += around_ahead(m) * (stage == grid.pipeline - 1)
        calls.append(CollectiveCalls("tp", "all_reduce", 4.0 * norms))
    elif m.qk_norm:  # of which every tensor rank sees its own heads' part
        widths = sum(head_norms(m, kinds) for kinds in layers if "attention" in kinds)
        calls.append(CollectiveCalls("tp", "all_reduce", 4.0 * widths))
    if model.head == "lm" and stage in (0, grid.pipeline - 1):
        calls.append(CollectiveCalls("ends", "broadcast", float(e * sent_embedding(m, grid))))
        if m.tie_embeddings:
            calls.append(CollectiveCalls("ends", "all_reduce", 4.0 * embedding_share(m, grid)))
    return within(calls, grid)


def refit_calls(job: PlanJob) -> list[CollectiveCalls]:
    """Return the calls of the rank that receives most, by `refit/transfer.py`. An engine that is written in place gets
    parts of shards, another one whole tensors."""
    assert job.engine is not None
    if not job.engine.placed:
        return gathered_calls(job)
    calls = factor_calls if job.engine.factors else part_calls
    by_stage = [calls(job, stage) for stage in range(job.grid.pipeline)]
    return max(by_stage, key=lambda calls: sum(call.size for call in calls))


def part_calls(job: PlanJob, stage: int) -> list[CollectiveCalls]:
    """Return the calls by which a rank of stage `stage` receives all of its engine's shard that it does not hold
    itself.

    Its own stage comes from the tensor ranks of its replica, experts that its replica lacks from other replicas, the
    rest from other stages. The rank is the one that holds least of its engine's shard."""
    model, grid, engine = job.served, job.grid, job.engine
    assert engine is not None
    e = min(job.element, engine.element)
    both = (
        min(_overlap(rank % parts, parts, rank % engine.tensor, engine.tensor) for rank in range(grid.gpus))
        for parts in (grid.tensor, grid.expert)
    )
    lacks, lacks_experts = (1 / engine.tensor - each for each in both)
    own = experts = others = 0.0
    for s in range(grid.pipeline):
        dense, routed, norms = _whole(model, grid, s)
        if s == stage:
            own = lacks * dense
            experts = lacks_experts * routed
        else:
            others += (dense + routed) / engine.tensor + norms
    sizes = {"tp": own, "ep": experts, "pp": others}
    calls = [CollectiveCalls(axis, "send", e * size, ceil(e * size / job.bucket_bytes)) for axis, size in sizes.items()]
    return within(calls, grid)


def apart_bytes(job: PlanJob) -> float:
    """Return the bytes that a rank with an engine of its own receives in a refit. If a rank that trains sends more,
    return those. The ranks of a stage share what the engines need of it."""
    model, grid, engine = job.served, job.grid, job.engine
    assert engine is not None
    if engine.factors:
        stages = [sent_bytes(model.shape, grid, -1, job.element)["pp"] / grid.pipeline] * grid.pipeline
    else:
        stages = [_wanted(job, s) for s in range(grid.pipeline)]
    return max(sum(stages), max(stages) * engine.ranks * grid.pipeline / grid.gpus)


def _wanted(job: PlanJob, stage: int) -> float:
    """Return the bytes of a stage's weights that one rank with an engine needs."""
    assert job.engine is not None
    dense, routed, norms = _whole(job.served, job.grid, stage)
    return min(job.element, job.engine.element) * ((dense + routed) / filled_together(job) + norms)


def factor_calls(job: PlanJob, stage: int) -> list[CollectiveCalls]:
    """Return the calls by which a rank of stage `stage` receives factors where the engine merges adapters, from the
    second refit on."""
    sizes = sent_bytes(job.policy.shape, job.grid, stage, job.element).items()
    return within(
        [CollectiveCalls(axis, "send", size, ceil(size / job.bucket_bytes)) for axis, size in sizes], job.grid
    )


def _overlap(i: int, parts: int, j: int, others: int) -> float:
    """Return how much of a whole the i-th of `parts` equal parts shares with the j-th of `others`."""
    return max(0.0, min((i + 1) / parts, (j + 1) / others) - max(i / parts, j / others))


def gathered_calls(job: PlanJob, stage: int = 0) -> list[CollectiveCalls]:
    """Return the calls that gather tensors of stage `stage` over its tensor ranks and, of experts, then send each
    expert rank's to the others, stage after stage. Of each stage's a tensor rank then sends its share to the other
    stages, which gather it. Every rank ends up with the whole model."""
    model, grid, e = job.served, job.grid, job.element
    calls = []
    for s in range(grid.pipeline):
        dense, experts, norms = _whole(model, grid, s)
        if s == stage:
            calls.append(CollectiveCalls("tp", "all_gather", float(e * dense)))
            calls.append(CollectiveCalls("ep", "broadcast", float(e * experts)))
        else:
            calls.append(CollectiveCalls("tp", "all_gather", float(e * (dense + experts + norms))))
        calls.append(CollectiveCalls("pp", "broadcast", e * (dense + experts + norms) / grid.tensor))
    return within(calls, grid)


def tensors(m: ModelConfig) -> int:
    """Count the tensors of a checkpoint: one for each expert."""
    rows = [spec for layer in range(m.num_layers) for spec in layer_table(m, m.layer_kinds(layer))]
    return sum(len(spec.hf) * (m.moe.num_experts if spec.experts else 1) for spec in [*rows, *end_table(m, "lm", 1)])


def _whole(model: PlannedModel, grid: Grid, stage: int) -> tuple[int, int, int]:
    """Return the parameters of a stage, once: dense ones that tensor ranks share, experts', and those that all hold
    whole."""
    count, norms = rank_parameters(model.shape, grid, stage), _replicated(model, grid, stage)
    dense = grid.tensor * (count.alike - norms - _copied(model, grid, stage))
    return dense, grid.expert * count.experts, norms


def _copied(model: PlannedModel, grid: Grid, stage: int) -> int:
    """Return the parameters of a rank of the stage that are a copy of a tied embedding, which stays where it is."""
    tied = model.shape.tie_embeddings and stage == grid.pipeline - 1 and grid.pipeline > 1
    return embedding_share(model.shape, grid) if tied else 0


def _replicated(model: PlannedModel, grid: Grid, stage: int) -> int:
    """Return the parameters of a stage that every tensor rank holds whole."""
    m = model.shape
    total = 0
    for kinds in stage_layers(m, grid, stage):
        total += layer_norms(m, kinds) + ("sparse" in kinds) * router_matrix(m)
        total += ("linear" in kinds) * linear_alike(m) + m.traits.layer_scalar
        total += ("indexer" in kinds) * (index_matrices(m) + 2 * m.indexer.head_dim)
        total += ("sparse" in kinds) * m.traits.branch_norms * m.moe.num_experts  # factors of the experts' weights
    return total + end_norms(m, grid, stage) + around_ahead(m) * (stage == grid.pipeline - 1)
