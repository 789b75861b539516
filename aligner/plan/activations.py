"""Bytes that one GPU needs for a forward and backward pass, by pipeline stage. They are the tensors that autograd
keeps, as measured by `benchmarks/context_memory.py` and by `aligner rehearse`, and those that backward needs in
addition."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.sections.model.config import ModelConfig
from aligner.plan.adapters import adapter_widths, is_adapted
from aligner.plan.job import PlanJob, PlannedModel
from aligner.plan.linear import gathered_width, rule_activations
from aligner.plan.shapes import (
    Grid,
    Kinds,
    attention_matrices,
    attention_widths,
    entry_widths,
    latent_widths,
    mixers,
    mlp_width,
    recomputed,
    recomputes_mlp,
    sent_embedding,
    stage_layers,
    widest_mlp,
)
from aligner.plan.shared import Shared, shared


def mlp_activations(m: ModelConfig, grid: Grid, kinds: Kinds) -> float:
    """Return what one layer keeps of an own token between input and output of its MLP or experts. Inputs of FP8 linear
    layers take a byte."""
    own = (1 + m.mlp_parts - ("fp8" in kinds) / 2) * mlp_width(m, kinds) / grid.tensor
    if "sparse" in kinds:  # tensor ranks send equal shares of the tokens to experts
        routed = (1 + m.traits.branch_norms) * m.hidden_size + m.moe.latent_size + m.moe.top_k * 2 * m.expert_hidden
        own += routed / grid.tensor
        own += m.traits.branch_norms * m.hidden_size * 4 / (grid.tensor if grid.sequence else 1)
    return own


def layer_activations(model: PlannedModel, grid: Grid, kinds: Kinds) -> tuple[float, float]:
    """Return the elements that one layer keeps for backward: (for each own token, for each token of all
    context-parallel ranks).

    Per own token: inputs and outputs of two norms (4 H; a 1/tp share with sequence parallelism), queries and the
    attention's output (2 A / tp; 3 A where context parallelism reorders), gate, up and their product (3 F / tp), keys
    and values (2 K / tp). Latent attention keeps its vectors, twice. An expert's token also keeps its input and output
    (2 H) for each of k; norms around experts and the MLP beside them keep 4 H, and experts' own input is H. With
    all-gather: keys and values of the whole row, once as gathered and about once as used.
    Linear attention keeps, without `rule_activations`, inputs and outputs of its products."""
    m, tp, linear = model.shape, grid.tensor, model.shape.linear
    a, k, v, _ = attention_widths(m, kinds)
    v = max(v, k)  # fused attention pads narrower ones
    norms = (mixers(kinds) + (mlp_width(m, kinds) > 0)) * m.hidden_size / (tp if grid.sequence else 1)
    own = norms * (1.5 if "fp8" in kinds else 2)
    own += 0 if recomputes_mlp(m, kinds) else mlp_activations(m, grid, kinds)
    if m.layer_input_size:  # the stream, the gate and its product with the input, what it adds before its norm
        own += (2 * m.hidden_size + 3 * m.layer_input_size) / (tp if grid.sequence else 1)
    if "linear" in kinds:
        own += (linear.key_heads * linear.width + 2 * linear.value_heads * linear.value_head_dim) / tp
        return own, gathered_width(m) / tp if grid.context > 1 and not grid.over_heads else 0.0
    if "attention" not in kinds:
        return own, 0.0
    if m.traits.entries:  # what queries and outputs are before they are normed, rotated and put in rows
        own += 4 * a / tp + 2 * entry_widths(m, kinds) + 2 * k
    if m.hyper.streams:  # the streams and what is added to them, for attention and the MLP
        own += 2 * (m.hyper.streams + 1) * m.hidden_size / (tp if grid.sequence else 1)
    own += (2 if grid.context == 1 else 3) * a / tp + 2 * sum(latent_widths(m)) / (tp if grid.sequence else 1)
    if m.indexer.loss and "indexer" in kinds:  # queries before and after rotation, keys
        own += 2 * (m.indexer.heads + 1) * m.indexer.head_dim
    makes = m.kv_matrices(kinds) > 0  # else another layer keeps its keys and values
    if m.qk_norm:
        own += (a + k * makes) / tp
    if grid.context > 1 and not grid.over_heads:
        return own, (k + v) * (1 + 1 / (2 * grid.context)) / tp
    return own + (k + v) * makes / tp, 0.0


@dataclass(frozen=True)
class StepTokens:
    """The micro-batches of an optimizer step."""

    count: int
    tokens: float  # that the largest one computes, over all context-parallel ranks
    shared: Shared | None


def _stream(job: PlanJob, model: PlannedModel) -> StepTokens:
    count, tokens = job.micro_batches(worst=True)
    alike = shared(job, tokens, count, in_order=not job.micro_tokens)
    tokens = tokens if alike is None else alike.tokens
    if model is not job.policy:
        return StepTokens(count, tokens, alike)
    ptx_count, ptx_tokens = job.ptx_micro_batches(worst=True)
    return StepTokens(count + ptx_count, max(tokens, ptx_tokens), None if ptx_tokens > tokens else alike)


def _put_together(model: PlannedModel, grid: Grid, alike: Shared, kinds: Kinds) -> float:
    """Return the elements that a layer keeps in addition to those of a stream without shared prompts. Keys and values
    of whole rows replace the stream's. With masks, those of followers have as many heads as queries, and attention's
    output is kept before it is put back into the stream."""
    if "attention" not in kinds:
        return 0.0
    a, k, v, out = attention_widths(model.shape, kinds)
    keys = k + max(v, k)
    wide, before = (a + max(out, a), a) if alike.mask else (keys, 0)
    return (before * alike.tokens + keys * (alike.leaders - alike.tokens) + wide * alike.followers) / grid.tensor


def _layers(job: PlanJob, model: PlannedModel, stage: int) -> list[float]:
    """Return the elements that each layer of a stage keeps of a micro-batch."""
    grid, m = job.grid, model.shape
    stream = _stream(job, model)
    tokens, layers = stream.tokens, stage_layers(m, grid, stage)
    sizes = dict[Kinds, float]()
    for kinds in set(layers):
        per_token, per_gathered = layer_activations(model, grid, kinds)
        per_token += adapter_widths(m, kinds, grid.tensor) if is_adapted(model) else 0
        sizes[kinds] = per_token * tokens / grid.context + per_gathered * tokens
        sizes[kinds] += _put_together(model, grid, stream.shared, kinds) if stream.shared else 0.0
        if "fp8" in kinds:  # and the matrices two, for either direction
            matrices = attention_matrices(m) + (1 + m.mlp_parts) * m.hidden_size * mlp_width(m, kinds)
            sizes[kinds] += matrices / grid.tensor
        if "linear" in kinds:  # where others' tokens are gathered, of rows from their beginning
            sizes[kinds] += rule_activations(m, job.package) / grid.tensor * grid.rule_share * tokens / job.element
    return [sizes[kinds] for kinds in layers]


def activation_bytes(job: PlanJob, model: PlannedModel, stage: int) -> float:
    """Return the bytes of the micro-batches that rank `stage` of a 1F1B pipeline holds at a time, min(micro-batches,
    stages - stage), or as many shares of them as an interleaved one begins before the first gradient. A recomputed
    layer keeps only its input. The last layer counts like the others, as rows may be almost all response."""
    grid, m, layers = job.grid, model.shape, _layers(job, model, stage)
    stream = _stream(job, model)
    own, share = stream.tokens / grid.context, grid.tensor if grid.sequence else 1
    wide = m.hidden_size * max(1, m.hyper.streams)  # between layers
    first = wide + 2 * m.num_layers * m.layer_input_size  # inputs of all layers, and what their norm sees
    ends = (stage == 0) * first / share + (stage == grid.pipeline - 1) * m.hidden_size * (1 + 1 / share)
    sent = 0
    if m.mtp.layers and stage == grid.pipeline - 1:
        ends += 6 * m.hidden_size / share  # both inputs of such a layer, their norms, and its last one's
        sent = sent_embedding(m, grid)
    again = recomputed(m, grid, stage, job.recompute)
    kept = sum(own * wide / share if twice else job.kept * size for size, twice in zip(layers, again, strict=True))
    turns, behind = grid.virtual, grid.pipeline - stage - 1
    in_flight = min(stream.count, behind + 1 if turns == 1 else (2 * behind + (turns - 1) * grid.pipeline + 1) / turns)
    mask = stream.shared.mask if stream.shared else 0.0
    return job.element * (in_flight * (kept + ends * own + mask) + sent)


def backward_bytes(job: PlanJob, model: PlannedModel, stage: int) -> float:
    """Return the bytes that backward of one layer needs in addition. Of a recomputed one: all that it keeps. Its
    MLP's gradients: 4 F / tp (gate and up, their product and its factors; 3 F without gates), and 2 H for each of an
    expert's k tokens.
    Its input's gradient, and with sequence parallelism its gathered input. A gradient to or from a neighbouring
    stage."""
    grid, m = job.grid, model.shape
    tokens = _stream(job, model).tokens
    sparse = any("sparse" in kinds for kinds in stage_layers(m, grid, stage))
    each = ((2 + m.mlp_parts) * widest_mlp(m) + sparse * 2 * m.moe.top_k * m.expert_hidden) / grid.tensor
    streams = max(1, m.hyper.streams)
    each += m.hidden_size * (1 + grid.sequence + 2 * (streams > 1) * streams)
    each += (grid.pipeline > 1) * streams * m.hidden_size / (grid.tensor if grid.sequence else 1)
    sizes = zip(_layers(job, model, stage), recomputed(m, grid, stage, job.recompute), strict=True)
    again = max((size for size, twice in sizes if twice), default=0)
    again_alone = [kinds for kinds in stage_layers(m, grid, stage) if recomputes_mlp(m, kinds)]
    each += max((mlp_activations(m, grid, kinds) for kinds in set(again_alone)), default=0)
    return job.element * (each * tokens / grid.context + again)
