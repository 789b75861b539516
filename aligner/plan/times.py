"""Seconds of each phase: operations over rate, bytes over bandwidth, collectives, and the bubble of the pipeline.

Only ranks overlap: collectives wait for products and the other way round, as the trainer runs them now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil

from aligner.config.sections.model.config import ModelConfig
from aligner.families.table import parameters
from aligner.plan.adapters import (
    adapter_operations,
    first_operations,
    is_adapted,
    needs_no_input_gradient,
    trained_parameters,
)
from aligner.plan.devices import Assumptions, Device
from aligner.plan.job import PlanJob, PlannedModel
from aligner.plan.linear import row_bytes
from aligner.plan.reads import reads
from aligner.plan.shapes import (
    Grid,
    decode_weight_bytes,
    expert_operations,
    head_operations,
    kv_bytes,
    latent_matrices,
    layer_operations,
)
from aligner.plan.sizes import logit_bytes, optimizer_share
from aligner.plan.traffic import CollectiveCalls, apart_bytes, axis_size, axis_span, pass_calls, refit_calls, step_calls

DECODE_PARTS = 64  # of a generation, each at its own number of rows and length


@dataclass
class PhaseTime:
    """Seconds by kind of work, and bytes on the wire by axis of one rank."""

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wire_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Machine:
    device: Device
    assumed: Assumptions
    gpus_per_node: int

    @property
    def rate(self) -> float:
        return self.device.flops * self.assumed.matrix

    def layer_seconds(self, m: ModelConfig, tokens: float, context: float, kept: float | None = None) -> float:
        """Return the seconds of one layer's forward products; `kept`: see `layer_operations`."""
        experts = expert_operations(m, tokens) / (self.device.flops * self.assumed.experts)
        return layer_operations(m, tokens, context, kept) / self.rate + experts

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth * self.assumed.memory_bandwidth

    def link(self, span: int) -> float:
        """Return the bandwidth of collectives of ranks that lie so far apart."""
        fast = span <= self.gpus_per_node
        return (self.device.nvlink if fast else self.device.network) * self.assumed.link

    def seconds(self, call: CollectiveCalls, grid: Grid) -> float:
        wire = call.wire(axis_size(grid, call.axis))
        return wire / self.link(axis_span(grid, call.axis)) + call.count * self.assumed.message_s


def _communicate(
    phase: PhaseTime, calls: Iterable[CollectiveCalls], job: PlanJob, machine: Machine, times: float = 1.0
) -> None:
    for call in calls:
        phase.parts[f"{call.axis} communication"] += times * machine.seconds(call, job.grid)
        phase.wire_bytes[call.axis] += times * call.wire(axis_size(job.grid, call.axis))


def _forward(
    job: PlanJob, model: PlannedModel, stage: int, tokens: float, machine: Machine, attention: bool = True
) -> float:
    """Return the seconds of the stage's layers, without adapters; without `attention` also without its products of
    tokens with tokens."""
    grid, m, read = job.grid, model.shape, reads(job, model, tokens)
    own, share = tokens / grid.context / grid.tensor, 1 / grid.context / grid.tensor
    seen, read_seen = (job.rows.context, read.context) if attention else (0.0, 0.0)
    layer = machine.layer_seconds(m, own, seen)
    total = m.num_layers / grid.pipeline * layer
    if stage == grid.pipeline - 1:
        total += machine.layer_seconds(m, own, read_seen, read.kept * share) - layer
    if not grid.sequence:  # what makes latent vectors is computed whole by every tensor rank
        whole = 2 * latent_matrices(m) * tokens / grid.context * (1 - 1 / grid.tensor) / machine.rate
        total += m.num_layers / grid.pipeline * whole
    return total


def micro_batch_seconds(
    job: PlanJob, model: PlannedModel, stage: int, tokens: float, backward: bool, machine: Machine
) -> float:
    """Return the seconds of one rank's products: forward 1, backward 2 (of frozen matrices 1), recomputed layers 1
    more, likewise a head whose logits come in parts. Outputs that nobody reads are left out."""
    grid, m, read, frozen = job.grid, model.shape, reads(job, model, tokens), is_adapted(model)
    total = _forward(job, model, stage, tokens, machine) * ((4 if job.recompute else 3) if backward else 1)
    if frozen:
        own, kept = tokens / grid.context, read.kept / grid.context
        total += adapter_operations(model, grid, stage, own, kept, backward, job.recompute) / machine.rate
        if backward:
            total -= _forward(job, model, stage, tokens, machine, attention=False)
            if needs_no_input_gradient(grid, stage, job.recompute):
                total -= first_operations(m, grid, own) / machine.rate
    if stage == grid.pipeline - 1:
        language = model.head == "lm"
        asked = (read.pairs if language else read.kept) / grid.context
        logits = logit_bytes(job, model, backward) * asked * m.vocab_size / grid.tensor
        again = 4 if language and logits > job.logits_bytes else 3
        again -= frozen and language
        head = head_operations(m, asked, model.head, model.outputs, grid.tensor)
        total += head * (again if backward else 1) / machine.rate
    return total


def _pipeline(
    phase: PhaseTime, job: PlanJob, model: PlannedModel, machine: Machine, count: int, tokens: float, backward: bool
) -> None:
    """Add `count` micro-batches through all stages. Each costs what the slowest stage does. The first one's way to the
    last stage comes on top, (stages - 1) / count of the whole (1F1B, arXiv:2104.04473)."""
    stages = job.grid.pipeline
    products, stage = max((micro_batch_seconds(job, model, s, tokens, backward, machine), s) for s in range(stages))
    phase.parts["products"] += count * products
    calls = pass_calls(job, model, stage, tokens, backward)
    _communicate(phase, calls, job, machine, count)
    if stages > 1:
        one = products + sum(machine.seconds(call, job.grid) for call in calls)
        phase.parts["bubble"] += (stages - 1) * one


def forward_phase(job: PlanJob, models: Iterable[PlannedModel], machine: Machine, share: float = 1.0) -> PhaseTime:
    """Return the time of passes without gradient over this share of the rows: logprobs, values, scores of reward
    models."""
    phase = PhaseTime()
    once = share * job.rows.tokens * (1 if job.packing else job.rows.longest / job.rows.mean)
    for model in models:
        on = job if model.grid is None else replace(job, grid=model.grid)
        tokens = (once if job.rollout else once * job.passes[model.role]) / on.grid.data
        count = max(1, ceil(tokens / job.logprob_tokens))
        _pipeline(phase, on, model, machine, count, tokens / count, backward=False)
    return phase


def adam_bytes(element: int) -> int:
    """Return the bytes of Adam for one parameter. It reads weight, gradient and two moments in float32 and writes all
    but the gradient. In bfloat16 it writes the rounded weight too."""
    return 28 + (element if element < 4 else 0)


def update_phase(job: PlanJob, machine: Machine) -> PhaseTime:
    """Return the time of all optimizer steps of a step."""
    phase, steps = PhaseTime(), job.minibatches * job.epochs
    for model in job.models:
        if model.trained:
            _add(phase, _optimizer_step(job, model, machine), steps)
    return phase


def pretrain_phase(job: PlanJob, machine: Machine) -> PhaseTime:
    """Return the time of `critic.pretrain_steps`, once: its optimizer steps, and its values computed again."""
    critic = [model for model in job.models if model.name == "critic"]
    phase = forward_phase(job, critic, machine)
    for model in critic:
        _add(phase, _optimizer_step(job, model, machine), job.pretrain_steps)
    return phase


def _add(phase: PhaseTime, other: PhaseTime, times: float = 1.0, prefix: str = "") -> None:
    for name, seconds in other.parts.items():
        phase.parts[prefix + name] += times * seconds
    for axis, size in other.wire_bytes.items():
        phase.wire_bytes[axis] += times * size


def _optimizer_step(job: PlanJob, model: PlannedModel, machine: Machine) -> PhaseTime:
    """Return the time of one model's step, with Adam's traffic for each parameter whose state the rank holds."""
    one = PhaseTime()
    _pipeline(one, job, model, machine, *job.micro_batches(), backward=True)
    if model is job.policy and job.ptx_rows:
        _pipeline(one, job, model, machine, *job.ptx_micro_batches(), backward=True)
    _communicate(one, step_calls(job, model, 0), job, machine)
    state = trained_parameters(model, job.grid, 0)
    share = optimizer_share(state, job.grid, model.distributed)
    one.parts["optimizer"] += adam_bytes(job.element) * share / machine.bandwidth
    return one


def refit_phase(job: PlanJob, machine: Machine) -> PhaseTime:
    """Return the time to receive from other ranks and to copy the engine's shard into its place (read and written)."""
    phase = PhaseTime()
    assert job.engine is not None
    if job.engine.ranks:
        moved = phase.wire_bytes["engines"] = apart_bytes(job)
        messages = ceil(moved / job.bucket_bytes)
        phase.parts["engines communication"] = moved / machine.link(job.gpus) + messages * machine.assumed.message_s
    else:
        _communicate(phase, refit_calls(job), job, machine)
    size = parameters(job.policy.shape) * job.engine.element / job.engine.tensor
    phase.parts["copy"] += 2 * size / machine.bandwidth
    return phase


def decode_step(job: PlanJob, machine: Machine, rows: float, context: float) -> tuple[float, float]:
    """Return (seconds of one decode step of an engine with `rows` rows at `context` tokens, seconds of its
    collectives). A step takes the larger of bytes (weights once, each row's cache) over bandwidth, operations over
    rate, and the host's time to launch."""
    engine, m = job.engine, job.policy.shape
    assert engine is not None
    tp, assumed = engine.tensor, machine.assumed
    kept = context * kv_bytes(m, engine.element, tp) + 2 * row_bytes(m) / tp  # memories are written too
    moved = decode_weight_bytes(m, rows, engine.element) / tp + rows * kept
    products = m.num_layers * machine.layer_seconds(m, rows, context) + head_operations(m, rows) / machine.rate
    busy = max(moved / machine.bandwidth, products / tp)
    if engine.launches:
        busy = max(busy, m.num_layers * assumed.layer_s)
    if tp == 1:
        return busy, 0.0
    call = CollectiveCalls(
        "tp", "all_reduce", 2 * m.num_layers * rows * m.hidden_size * engine.element, 2 * m.num_layers
    )
    # latency of a small all-reduce in a node by NVLink: the engines have kernels of their own for it
    wire = call.wire(tp) / machine.link(tp) + call.count * assumed.message_s / 2
    return busy + wire, wire


def generate_phase(job: PlanJob, machine: Machine) -> PhaseTime:
    """Return the time to prefill each prompt once, then to decode until the last row has ended.

    Rows that run at time t after their start are those that are longer. With `refill` waiting rows take free slots: the
    engine decodes `slots` rows until none waits, then fewer and fewer. Without, every batch thins out."""
    phase, engine, rows = PhaseTime(), job.engine, job.rows
    assert engine is not None
    m, prompts = job.policy.shape, rows.prompts / job.replicas
    products = m.num_layers * machine.layer_seconds(m, prompts * rows.prompt_mean, rows.prompt_mean / 2)
    phase.parts["prefill"] += products / engine.tensor
    own_rows, slots = rows.count / job.replicas, job.slots()[0]
    slots, lengths = min(slots, own_rows), rows.lengths

    def run(active: float, steps: float, t: float) -> None:
        reach = rows.prompt_longest + t if engine.padded else rows.prompt_mean + t
        busy, wire = decode_step(job, machine, max(1.0, active), reach)
        phase.parts["decode"] += steps * (busy - wire)
        if wire:
            phase.parts["tp communication"] += steps * wire

    waves = ceil(own_rows / slots - 1e-9)
    if engine.refill and waves > 1:
        late = rows.response_longest if engine.padded else rows.response_mean / 2
        run(slots, (own_rows - slots) * rows.response_mean / slots, late)
        waves = 1
    width = rows.response_longest / DECODE_PARTS
    for i in range(DECODE_PARTS):
        t = (i + 0.5) * width
        alive = lengths.alive(t)
        if not alive:
            break
        anyone = 1 - (1 - alive) ** slots  # that one of the rows still runs
        run(slots * alive / anyone, waves * anyone * width, t)
    return phase


def plan_times(job: PlanJob, device: Device, assumed: Assumptions) -> dict[str, PhaseTime]:
    machine = Machine(device, assumed, job.gpus_per_node)
    phases: dict[str, PhaseTime] = {}
    if job.rollout:
        if job.engine is not None:
            phases["refit"] = refit_phase(job, machine)
            phases["generate"] = generate_phase(job, machine)
        scorers = [model for model in job.models if model.name == "reward"]
        if scorers or job.judges:
            phases["score"] = forward_phase(job, scorers, machine)
        for judge in job.judges:
            _add(phases["score"], generate_phase(job.asked_by(judge), machine), prefix="judges' ")
    if job.asked:
        learned = job.learned * job.minibatches / job.rows.count
        phases["logprobs"] = forward_phase(job, job.asked, machine, learned)
    if any(model.trained for model in job.models):
        phases["update"] = update_phase(job, machine)
    return phases


def update_mfu(job: PlanJob, device: Device, update: PhaseTime) -> float:
    """Return the computed operations over the peak of the GPUs that train: 6 N a token (4 N of frozen matrices) less
    those of outputs that nobody reads. Attention's, adapters' and recomputed operations are left out."""
    count, tokens = job.micro_batches()
    real = tokens if job.packing else tokens * job.rows.mean / job.rows.longest
    made = 0.0
    for model in job.models:
        if model.trained:
            m, read = model.shape, reads(job, model, tokens)
            kept = min(read.kept, real)
            forward = (m.num_layers - 1) * layer_operations(m, real, 0) + layer_operations(m, real, 0, kept)
            forward += m.num_layers * expert_operations(m, real)
            forward += head_operations(m, read.pairs if model.head == "lm" else kept, model.head)
            made += (2 if is_adapted(model) else 3) * forward
    passes = count * job.minibatches * job.epochs * job.grid.data
    return made * passes / (update.seconds * job.grid.gpus * device.flops)
