"""Bytes that one GPU needs for a forward and backward pass, by pipeline stage. They are the tensors that autograd
keeps, as measured by `benchmarks/context_memory.py` and by `aligner rehearse`, and those that backward needs in
addition."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aligner.plan.adapters import adapter_widths, is_adapted
from aligner.plan.job import PlanJob, PlannedModel
from aligner.plan.linear import gathered_width, rule_activations
from aligner.plan.shapes import Grid, attention_widths, latent_widths, mlp_width, stage_layers, stage_linear, widest_mlp
from aligner.plan.shared import Shared, shared


def layer_activations(model: PlannedModel, grid: Grid, sparse: bool) -> tuple[float, float]:
    """Return the elements that one layer keeps for backward: (for each own token, for each token of all
    context-parallel ranks).

    Per own token: inputs and outputs of two norms (4 H; a 1/tp share with sequence parallelism), queries and the
    attention's output (2 A / tp; 3 A where context parallelism reorders), gate, up and their product (3 F / tp), keys
    and values (2 K / tp). Latent attention keeps its vectors, twice. An expert's token also keeps its input and output
    (2 H) for each of k. With all-gather: keys and values of the whole row, once as gathered and about once as used."""
    m, tp = model.shape, grid.tensor
    a, k, v, _ = attention_widths(m)
    v = max(v, k)  # fused attention pads narrower ones
    own = 4 * m.hidden_size / (tp if grid.sequence else 1) + (2 if grid.context == 1 else 3) * a / tp
    own += 2 * sum(latent_widths(m)) / (tp if grid.sequence else 1)
    own += 3 * mlp_width(m, sparse) / tp
    if m.qk_norm:
        own += (a + k) / tp
    if sparse:
        own += m.hidden_size + m.moe.top_k * 2 * m.hidden_size
    if grid.context > 1 and not grid.over_heads:
        return own, (k + v) * (1 + 1 / (2 * grid.context)) / tp
    return own + (k + v) / tp, 0.0


def _linear_activations(model: PlannedModel, grid: Grid, sparse: bool) -> tuple[float, float]:
    """Return `layer_activations` of a layer of linear attention, without `rule_activations`. Inputs and outputs of its
    products replace queries, keys, values and output."""
    m, linear = model.shape, model.shape.linear
    a, k, v, _ = attention_widths(m)
    attention = ((2 if grid.context == 1 else 3) * a + k + max(v, k) + m.qk_norm * (a + k)) / grid.tensor
    own = layer_activations(model, replace(grid, over_heads=True), sparse)[0] - attention
    own += (linear.key_heads * linear.width + 2 * linear.value_heads * linear.value_head_dim) / grid.tensor
    return own, gathered_width(m) / grid.tensor if grid.context > 1 and not grid.over_heads else 0.0


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


def _put_together(model: PlannedModel, grid: Grid, alike: Shared, linear: bool) -> float:
    """Return the elements that a layer keeps in addition to those of a stream without shared prompts. Keys and values
    of whole rows replace the stream's. With masks, those of followers have as many heads as queries, and attention's
    output is kept before it is put back into the stream."""
    if linear:
        return 0.0
    a, k, v, out = attention_widths(model.shape)
    keys = k + max(v, k)
    wide, before = (a + max(out, a), a) if alike.mask else (keys, 0)
    return (before * alike.tokens + keys * (alike.leaders - alike.tokens) + wide * alike.followers) / grid.tensor


def _layers(job: PlanJob, model: PlannedModel, stage: int) -> list[float]:
    """Return the elements that each layer of a stage keeps of a micro-batch."""
    grid, m = job.grid, model.shape
    stream = _stream(job, model)
    tokens, layers = stream.tokens, []
    for sparse, linear in zip(stage_layers(m, grid, stage), stage_linear(m, grid, stage), strict=True):
        per_token, per_gathered = (_linear_activations if linear else layer_activations)(model, grid, sparse)
        per_token += adapter_widths(m, sparse, linear, grid.tensor) if is_adapted(model) else 0
        layers.append(per_token * tokens / grid.context + per_gathered * tokens)
        layers[-1] += _put_together(model, grid, stream.shared, linear) if stream.shared else 0.0
        if linear:  # in float32; where others' tokens are gathered, of rows from their beginning
            again = 1 + 1 / (2 * grid.context) if grid.context > 1 and not grid.over_heads else 1 / grid.context
            layers[-1] += rule_activations(m) / grid.tensor * again * tokens * 4 / job.element
    return layers


def activation_bytes(job: PlanJob, model: PlannedModel, stage: int) -> float:
    """Return the bytes of the micro-batches that stage `stage` of a 1F1B pipeline holds at a time, min(micro-batches,
    stages - stage). With recomputation each layer keeps only its input. The last layer counts like the others, as rows
    may be almost all response."""
    grid, m, layers = job.grid, model.shape, _layers(job, model, stage)
    stream = _stream(job, model)
    own, share = stream.tokens / grid.context, grid.tensor if grid.sequence else 1
    ends = (stage == 0) * m.hidden_size / share + (stage == grid.pipeline - 1) * m.hidden_size * (1 + 1 / share)
    kept = len(layers) * own * m.hidden_size / share if job.recompute else job.kept * sum(layers)
    in_flight = min(stream.count, grid.pipeline - stage)
    mask = stream.shared.mask if stream.shared else 0.0
    return job.element * in_flight * (kept + ends * own + mask)


def backward_bytes(job: PlanJob, model: PlannedModel, stage: int) -> float:
    """Return the bytes that backward of one layer needs in addition. With recomputation: all that the layer keeps. Its
    MLP's gradients: 4 F / tp (gate and up, their product and its factors), and 2 H for each of an expert's k tokens.
    Its input's gradient, and with sequence parallelism its gathered input. A gradient to or from a neighbouring
    stage."""
    grid, m = job.grid, model.shape
    tokens = _stream(job, model).tokens
    sparse = any(stage_layers(m, grid, stage))
    each = 4 * widest_mlp(m) / grid.tensor + sparse * 2 * m.moe.top_k * m.hidden_size
    each += m.hidden_size * (2 if grid.sequence else 1)
    each += (grid.pipeline > 1) * m.hidden_size / (grid.tensor if grid.sequence else 1)
    return job.element * (each * tokens / grid.context + (max(_layers(job, model, stage)) if job.recompute else 0))
