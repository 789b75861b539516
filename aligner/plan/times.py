"""Seconds of each phase: operations over rate, bytes over bandwidth, collectives, and the bubble of the pipeline.

Gradients travel beside the last micro-batch's backward. All other collectives wait for products and the other way
round, as the trainer runs them now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, log, sqrt

from aligner.config.sections.model.config import ModelConfig
from aligner.families.table import parameters
from aligner.plan.adapters import (
    adapter_operations,
    first_operations,
    is_adapted,
    needs_no_input_gradient,
    trained_parameters,
)
from aligner.plan.decoding import decode_step, drafting_seconds
from aligner.plan.devices import Assumptions, Device
from aligner.plan.host import engine_host_bytes
from aligner.plan.job import PlanJob, PlannedModel
from aligner.plan.linear import rule_bytes, rule_operations
from aligner.plan.muon import muon_operations
from aligner.plan.reads import reads
from aligner.plan.shapes import (
    Grid,
    ahead_operations,
    attention_widths,
    chooses,
    expert_latents,
    expert_operations,
    head_operations,
    index_operations,
    input_matrices,
    latent_matrices,
    layer_operations,
    mlp_width,
    recomputed,
    recomputed_share,
    stage_layers,
    stream_matrices,
)
from aligner.plan.shared import Shared, shared
from aligner.plan.sizes import engine_bytes, logit_bytes, optimizer_share
from aligner.plan.traffic import (
    CollectiveCalls,
    apart_bytes,
    axis_size,
    axis_stride,
    buffered_calls,
    message_seconds,
    pass_calls,
    refit_calls,
    step_calls,
    tensors,
)

BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000  # parameters of Megatron's buckets: the larger, by data-parallel ranks
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
class Work:
    """Passes over a model's layers: how often forward and backward, and whether matrices get gradients."""

    forward: int = 1
    backward: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class Machine:
    device: Device
    assumed: Assumptions
    gpus_per_node: int

    @property
    def rate(self) -> float:
        return self.device.flops * self.assumed.products

    def copied(self, size: float) -> float:
        """Return the seconds of copies, or of an optimizer, that read and write so many bytes."""
        return size / (self.device.bandwidth * self.assumed.memory)

    def moved(self, size: float) -> float:
        """Return the seconds of a step's other element-wise kernels that read and write so many bytes."""
        return size / (self.device.bandwidth * self.assumed.element_wise)

    def layer_products(self, m: ModelConfig, tokens: float, kept: float | None = None) -> float:
        """Return the seconds of one layer's forward products of tokens with matrices; `kept`: see
        `layer_operations`."""
        experts = expert_operations(m, tokens) / (self.device.flops * self.assumed.experts)
        rules = m.share("linear") * rule_operations(m, tokens)
        return (layer_operations(m, tokens, 0, kept) - rules) / self.rate + experts

    def rule(self, m: ModelConfig, tokens: float, package: bool) -> float:
        """Return the seconds of one layer's forward rule of linear attention: torch's operations are in float32."""
        if not m.share("linear"):
            return 0.0
        rate = self.rate * (1 if package else self.assumed.wide)
        moved = self.moved(tokens * rule_bytes(m, self.assumed.rule_passes, package))
        return m.share("linear") * (rule_operations(m, tokens) / rate + moved)

    def attention(
        self, m: ModelConfig, tokens: float, context: float, work: Work = Work(), masked: float = 0.0
    ) -> float:
        """Return the seconds of one layer's products of tokens with tokens; `masked`: share of them under a mask.
        Backward has five for the two of forward."""
        prices, operations = self.assumed, layer_operations(m, 0, context, tokens) - layer_operations(m, 0, 0, tokens)
        if chooses(m, context):
            return self._chosen(m, tokens, context, work, operations)
        forward = (1 - masked) / prices.flash_forward + masked / prices.masked_forward
        backward = (1 - masked) / prices.flash_backward + masked / prices.masked_backward
        return operations * (work.forward * forward + 2.5 * work.backward * backward) / self.device.flops

    def _chosen(self, m: ModelConfig, tokens: float, context: float, work: Work, operations: float) -> float:
        """Return the seconds of attention under masks of indexers, all of which backward makes again. Their scores are
        float32: written, cut off at 0, and summed over heads."""
        prices, heads = self.assumed, m.indexer.heads * tokens * context
        index = 2 * heads * m.indexer.head_dim / self.rate + self.moved(16 * heads)
        forward = operations / prices.masked_forward / self.device.flops
        backward = 2.5 * operations / prices.masked_backward / self.device.flops
        if m.indexer.loss and work.backward:  # weights of all heads in float32, and the scores' gradients
            forward += operations / self.rate / 2 + self.moved(12 * m.num_heads * tokens * context)
            backward += 2 * index
        return (work.forward + work.backward) * (index + forward) + work.backward * backward

    def element_wise(self, m: ModelConfig, tokens: float, stream: float, element: int) -> float:
        """Return the seconds of one layer's element-wise kernels in a forward pass over a rank's share of `tokens`,
        `stream` of which are in the stream between its products."""
        a, k, v, _ = attention_widths(m)
        sparse, routed = m.share("sparse"), m.moe.top_k * m.expert_hidden
        mlp = sparse * mlp_width(m, ("sparse",)) + m.mean_ffn
        mixers, passes = m.share("attention") + m.share("linear"), self.assumed
        own = passes.head_passes * mixers * (a + k + v)
        own += passes.mlp_passes * mlp + passes.routed_passes * sparse * routed
        halves = 0.5 if m.traits.single else 1.0
        return self.moved(element * (tokens * own + stream * halves * passes.stream_passes * m.hidden_size))

    def seconds(self, call: CollectiveCalls, grid: Grid) -> float:
        ranks, stride = axis_size(grid, call.axis), axis_stride(grid, call.axis)
        here = min(ranks, max(1, self.gpus_per_node // stride))
        return message_seconds(call, ranks, here, self.device, self.assumed)


def _communicate(
    phase: PhaseTime, calls: Iterable[CollectiveCalls], job: PlanJob, machine: Machine, exposed: float = 1.0
) -> None:
    """Add the calls, for a share of whose seconds the rank waits."""
    for call in calls:
        if call.moe is not None and job.pairs:
            copies = call.moe.top_k / call.moe.reached(axis_size(job.grid, call.axis))
            call = replace(call, size=call.size * copies, moe=None)
        waits = machine.assumed.exposed if call.axis in job.overlap else exposed
        phase.parts[f"{call.axis} communication"] += waits * machine.seconds(call, job.grid)
        phase.wire_bytes[call.axis] += call.wire(axis_size(job.grid, call.axis))


def _layers(job: PlanJob, model: PlannedModel, stage: int, tokens: float, machine: Machine, work: Work) -> float:
    """Return the seconds of the stage's layers, without adapters. Prompts that rows share are computed once."""
    grid, m, read = job.grid, model.shape, reads(job, model, tokens)
    alike = _alike(job, tokens)
    computed = _computed(alike, tokens)
    masked = alike.followers / tokens if alike and alike.mask else 0.0
    share = 1 / grid.context / grid.tensor
    own, kept, last = computed * tokens * share, computed * read.kept * share, stage == grid.pipeline - 1
    count = len(stage_layers(m, grid, stage))
    products = (count - last) * machine.layer_products(m, own) + last * machine.layer_products(m, own, kept)
    if not grid.sequence:  # what every tensor rank has whole, it computes for all tokens
        whole = latent_matrices(m) + stream_matrices(m) + m.share("sparse") * expert_latents(m) + input_matrices(m)
        products += count * 2 * whole * own * (grid.tensor - 1) / machine.rate
    products *= work.forward + (2 - work.frozen + recomputed_share(m)) * work.backward
    stream = own * (1 if grid.sequence else grid.tensor)
    passed = work.forward + work.backward * (m.indexer.loss > 0)
    products += passed * count * index_operations(m, own * grid.tensor, stream) / machine.rate
    attention = (count - last) * machine.attention(m, tokens * share, job.rows.context, work, masked)
    attention += last * machine.attention(m, read.kept * share, read.context, work, masked)
    passes = count * machine.element_wise(m, own, stream, job.element) * (work.forward + 2 * work.backward)
    rules = count * machine.rule(m, tokens * grid.rule_share / grid.tensor, job.package)
    rules *= work.forward + 2 * work.backward
    faster = machine.assumed.fp8_products if m.fp8_step > 1 else machine.assumed.fp8
    exact = sum("fp8" not in kinds for kinds in stage_layers(m, grid, stage)) / count if m.fp8_step > 1 else 0
    return products * (exact + (1 - exact) / faster) + attention + passes + rules


def _alike(job: PlanJob, tokens: float) -> Shared | None:
    """Return what rows of mean length share in a micro-batch of `tokens`."""
    rows = job.rows
    mean = replace(rows, prompt_longest=rows.prompt_mean, response_longest=rows.response_mean)
    return shared(replace(job, rows=mean), tokens, job.micro_batches()[0], in_order=not job.micro_tokens)


def _computed(alike: Shared | None, tokens: float) -> float:
    """Return the share of a micro-batch's `tokens` that is computed."""
    return alike.tokens / tokens if alike else 1.0


def computed_tokens(job: PlanJob) -> float:
    """Return the tokens of a micro-batch that are computed, of rows of mean length."""
    tokens = job.micro_batches()[1]
    return tokens * _computed(_alike(job, tokens), tokens)


def micro_batch_seconds(
    job: PlanJob, model: PlannedModel, stage: int, tokens: float, backward: bool, machine: Machine
) -> float:
    """Return the seconds of one rank's kernels: forward 1, backward 2 (of frozen matrices 1), recomputed layers 1
    more, likewise a head whose logits come in parts. Outputs that nobody reads are left out. Gradients of a micro-batch
    are added to those before."""
    grid, m, read, frozen = job.grid, model.shape, reads(job, model, tokens), is_adapted(model)
    again = recomputed(m, grid, stage, job.recompute)
    work = Work(1 + sum(again) / len(again), 1, frozen) if backward else Work()
    total = _layers(job, model, stage, tokens, machine, work)
    total += ahead_operations(m, tokens / grid.context) * (1 + 2 * backward) / machine.rate
    if frozen:
        own, kept = tokens / grid.context, read.kept / grid.context
        total += adapter_operations(model, grid, stage, own, kept, backward, job.recompute) / machine.rate
        if backward and needs_no_input_gradient(m, grid, stage, job.recompute):
            total -= first_operations(m, grid, own) / machine.rate
    if backward:
        total += machine.moved((2 * model.gradient + job.element) * trained_parameters(model, grid, stage).total)
    if stage == grid.pipeline - 1:
        language = model.head == "lm"
        asked = (read.pairs if language else read.kept) / grid.context
        made = asked * m.vocab_size / grid.tensor * language
        again = backward and logit_bytes(job, model, backward) * made > job.logits_bytes
        heads = 1 + m.mtp.layers
        made *= heads
        head = heads * head_operations(m, asked, model.head, model.outputs, grid.tensor)
        total += head * (1 + again + backward * (2 - (frozen and language))) / machine.rate
        total += machine.moved(machine.assumed.logit_bytes * made * (1 + again + 2 * backward))
    return total


def _pipeline(
    phase: PhaseTime, job: PlanJob, model: PlannedModel, machine: Machine, count: int, tokens: float, backward: bool
) -> None:
    """Add `count` micro-batches through all stages. Each costs what the slowest stage does. The first one's way to the
    last stage comes on top, (stages - 1) / count of the whole (1F1B; divided by `virtual`: arXiv:2104.04473)."""
    grid, one = job.grid, PhaseTime()
    stages = range(grid.pipeline)
    kernels, stage = max((micro_batch_seconds(job, model, s, tokens, backward, machine), s) for s in stages)
    one.parts["kernels"] = kernels * (1 if job.balanced else _largest_share(job))
    calls = pass_calls(job, model, stage, tokens, backward)
    _communicate(one, [c if c.axis != "pp" else replace(c, size=c.size * grid.virtual) for c in calls], job, machine)
    if backward:
        computed = _computed(_alike(job, tokens), tokens) * tokens
        beside = sum(machine.seconds(call, grid) for call in buffered_calls(job, model, stage, computed))
        one.parts["tp communication"] -= min(machine.assumed.beside * beside, kernels)
    if grid.pipeline > 1:
        phase.parts["bubble"] += (grid.pipeline - 1) / grid.virtual * one.seconds
    _add(phase, one, count)


def _largest_share(job: PlanJob) -> float:
    """Return the tokens of the data-parallel rank with most over their mean: rows of a normal sum, dealt by number."""
    rows, ranks = job.learned / job.grid.data, job.grid.data
    return 1 + job.rows.lengths.deviation / job.rows.mean * sqrt(2 * log(ranks) / rows)


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
    """Return the time of one model's step, with Adam's traffic for each parameter whose state the rank holds, also
    where Muon has less of it."""
    one = PhaseTime()
    _pipeline(one, job, model, machine, *job.micro_batches(), backward=True)
    if model.shape.moe.aux_coef and model.shape.moe.aux_over == "minibatch" and job.micro_batches()[0] > 1:
        _pipeline(one, job, model, machine, *job.micro_batches(), backward=False)  # counts the experts' load
    if model is job.policy and job.ptx_rows:
        _pipeline(one, job, model, machine, *job.ptx_micro_batches(), backward=True)
    states = [trained_parameters(model, job.grid, stage) for stage in range(job.grid.pipeline)]
    most = max(states, key=lambda state: state.total)
    calls = step_calls(job, model, states.index(most))
    reduced = [call for call in calls if call.axis in ("dp", "edp") and call.op != "all_gather"]
    _communicate(one, reduced, job, machine, _exposed(reduced, job, model, machine))
    _communicate(one, [call for call in calls if call not in reduced], job, machine)
    share = optimizer_share(most, job.grid, model.distributed)
    one.parts["optimizer"] += machine.copied(adam_bytes(job.element) * share)
    if model.muon:
        rate = machine.rate * (machine.assumed.wide if model.muon == "float32" else 1)
        one.parts["Muon"] += muon_operations(model.shape, job.grid, states.index(most)) / rate
    return one


def _exposed(reduced: list[CollectiveCalls], job: PlanJob, model: PlannedModel, machine: Machine) -> float:
    """Return the share of the time to reduce gradients for which the step waits: of the last bucket, and what lasts
    longer than the last micro-batch's backward."""
    seconds, size = sum(machine.seconds(call, job.grid) for call in reduced), sum(call.size for call in reduced)
    if not seconds or job.overlap:  # then `Assumptions.exposed` says it
        return 1.0
    tokens = job.micro_batches()[1]
    both, forward = (micro_batch_seconds(job, model, 0, tokens, backward, machine) for backward in (True, False))
    last = model.gradient * max(BUCKET, BUCKET_PER_RANK * job.grid.replicas)
    return min(1.0, max(last / size, 1 - (both - forward) / seconds))


def refit_phase(job: PlanJob, machine: Machine) -> PhaseTime:
    """Return the time to receive from other ranks and to copy the engine's shard into its place (read and written). An
    engine in a process of its own, on ranks of its own, reads it from host memory."""
    phase, assumed = PhaseTime(), machine.assumed
    assert job.engine is not None
    if job.engine.ranks:
        whole = parameters(job.served.shape) * job.element
        moved = phase.wire_bytes["engines"] = apart_bytes(job) if job.engine.placed else whole
        messages = ceil(moved / job.bucket_bytes)
        link = machine.device.nvlink if job.gpus <= job.gpus_per_node else machine.device.network
        phase.parts["engines communication"] = moved / link / assumed.link + messages * assumed.message_s
    else:
        _communicate(phase, refit_calls(job), job, machine)
    if not job.engine.placed:
        phase.parts["tensors"] += assumed.tensor_s * tensors(job.served.shape)
    shard = engine_bytes(job.served.shape, job.engine.tensor, job.engine.element, shares=job.engine.shares)
    phase.parts["copy"] += machine.copied(2 * shard)
    if job.engine.placed and (written := engine_host_bytes(job)):
        phase.parts["copy"] += (written + shard) / assumed.host_link
    return phase


def prefill_seconds(m: ModelConfig, tokens: float, context: float, machine: Machine, package: bool) -> float:
    """Return the seconds of one GPU's layers over `tokens` that see `context` tokens on average."""
    kernels = machine.layer_products(m, tokens) + machine.attention(m, tokens, context)
    kernels += machine.rule(m, tokens, package) + index_operations(m, tokens) / machine.rate
    return m.num_layers * (kernels + machine.element_wise(m, tokens, tokens, 2))


def generate_phase(job: PlanJob, machine: Machine) -> PhaseTime:
    """Return the time to prefill each prompt once, then to decode until the last row has ended.

    Rows that run at time t after their start are those that are longer. With `refill` waiting rows take free slots: the
    engine decodes `slots` rows until none waits, then fewer and fewer. Without, every batch thins out."""
    phase, engine, rows = PhaseTime(), job.engine, job.rows
    assert engine is not None
    m, prompts = job.policy.shape, rows.prompts / job.replicas
    tokens, seen = prompts * rows.prompt_mean, rows.prompt_mean / 2
    phase.parts["prefill"] += prefill_seconds(m, tokens, seen, machine, job.package)
    phase.parts["prefill"] /= engine.tensor
    if engine.drafter:
        drafts = prefill_seconds(engine.drafter, tokens, seen, machine, job.package)
        phase.parts["drafts"] += drafts / engine.drafting
    own_rows, slots = rows.count / job.replicas, job.slots()[0]
    slots, lengths = min(slots, own_rows * (engine.lag if engine.in_flight else 1)), rows.lengths

    def run(active: float, steps: float, t: float) -> None:
        reach = rows.prompt_longest + t if engine.padded else rows.prompt_mean + t
        active, fed = max(1.0, active), 1
        if engine.drafts and engine.accepted and active * (1 + engine.drafts) <= engine.max_batch:
            fed, steps = 1 + engine.drafts, steps / engine.accepted
        busy, wire = decode_step(job, machine, active, reach, fed)
        if fed > 1 and (engine.drafter or job.served.shape.mtp.layers):
            phase.parts["drafts"] += steps * drafting_seconds(job, machine, active, reach)
        phase.parts["decode"] += steps * (busy - wire)
        if wire:
            phase.parts["tp communication"] += steps * wire

    if engine.in_flight:  # others begin as soon as rows end
        run(slots, own_rows * rows.response_mean / slots, rows.response_mean / 2)
        return phase
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
        host_s = assumed.rollout_s if job.engine is not None and job.engine.reserved else 0.0
        if scorers or job.judges or host_s:
            phases["score"] = forward_phase(job, scorers, machine)
            phases["score"].parts["host"] += host_s
        for judge in job.judges:
            _add(phases["score"], generate_phase(job.asked_by(judge), machine), prefix="judges' ")
    elif job.engine is not None and (share := job.passes.get("generate", 0.0)):
        for name, whole in (("refit", refit_phase(job, machine)), ("generate", generate_phase(job, machine))):
            _add(phases.setdefault(name, PhaseTime()), whole, share)
    if job.asked:
        learned = job.learned * job.minibatches / job.rows.count
        phases["logprobs"] = forward_phase(job.taught, job.asked, machine, learned)
    if any(model.trained for model in job.models):
        phases["update"] = update_phase(job, machine)
    return phases


def update_mfu(job: PlanJob, device: Device, update: PhaseTime) -> float:
    """Return the computed operations over the peak of the GPUs that train: 6 N a token (4 N of frozen matrices) less
    those of outputs that nobody reads, and of prompts that rows share and that are computed once. Attention's,
    adapters' and recomputed operations are left out."""
    count, tokens = job.micro_batches()
    once = _computed(_alike(job, tokens), tokens)
    real = once * (tokens if job.packing else tokens * job.rows.mean / job.rows.longest)
    made = 0.0
    for model in job.models:
        if model.trained:
            m, read = model.shape, reads(job, model, tokens)
            kept = min(read.kept, real)
            forward = (m.num_layers - 1) * layer_operations(m, real, 0) + layer_operations(m, real, 0, kept)
            ahead = m.mtp.layers
            forward += ahead * layer_operations(m, real, 0) + ahead_operations(m, real)
            forward += (m.num_layers + ahead) * expert_operations(m, real)
            forward += (1 + ahead) * head_operations(m, read.pairs if model.head == "lm" else kept, model.head)
            made += (2 if is_adapted(model) else 3) * forward
    passes = count * job.minibatches * job.epochs * job.grid.data
    return made * passes / (update.seconds * job.grid.gpus * device.flops)
