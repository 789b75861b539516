"""Bytes on one GPU, by what holds them and by phase.

Weights, gradients and optimizer state are exact (`tests/plan` compares them with Megatron's buffers). Activations count
what autograd keeps, as measured by `benchmarks/context_memory.py`; transients are the large ones of each phase.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aligner.config.sections.engine import message_bytes
from aligner.errors import AlignerError
from aligner.plan.adapters import (
    adapter_widths,
    held_parameters,
    is_adapted,
    kept_bytes,
    saved_bytes,
    trained_parameters,
)
from aligner.plan.devices import GIB, Assumptions, Device
from aligner.plan.job import PREFILL_TOKENS, Job, Part
from aligner.plan.linear import gathered_width, rule_activations
from aligner.plan.reads import most_read
from aligner.plan.shapes import (
    Count,
    Grid,
    attention_widths,
    latent_widths,
    mlp_width,
    parameters,
    rank_parameters,
    stage_layers,
    stage_linear,
    widest_mlp,
)

SAMPLED_LOGITS = 1 << 26  # float64 cumulative sums of the native sampler at a time

# item -> (what it is, keys that make it smaller)
ITEMS = {
    "weights": ("weights", "parallel.tensor, parallel.pipeline, parallel.expert"),
    "gradients": ("float32 gradients", "parallel.tensor, parallel.pipeline, parallel.expert"),
    "optimizer": ("optimizer state", "more GPUs, parallel.tensor, parallel.pipeline"),
    "activations": ("activations", "batch.micro_batch_tokens or micro_batch_samples, parallel.context"),
    "logits": ("logits", "batch.logits_bytes, parallel.tensor"),
    "engine weights": ("the engine's weights", "engine.tensor_parallel, engine.dtype"),
    "kv cache": ("the engine's KV cache", "engine.kv_cache_bytes, engine.max_batch"),
    "prefill": ("prefill", "engine.tensor_parallel"),
    "sampling": ("logits being sampled", "engine.max_batch"),
    "buckets": ("tensors on their way to the engine", "refit.bucket_bytes"),
    "forward": ("one layer's forward pass", "batch.logprob_tokens, parallel.tensor, parallel.context"),
}


class MemoryPlanError(AlignerError):
    """A configuration that cannot fit; names the largest items and the keys to change."""


@dataclass(frozen=True)
class Memory:
    """`phases`: phase -> item -> bytes, of the GPU that needs most in that phase."""

    phases: dict[str, dict[str, float]]
    context_bytes: float  # of the driver and libraries, in every phase
    limit_bytes: float

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values()) + self.context_bytes

    @property
    def peak(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak_bytes(self) -> float:
        return self.total(self.peak)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


def weight_bytes(count: Count, element: int) -> float:
    return element * (count.dense + count.experts) + 4 * (count.score + count.fixed + count.magnitudes)


def model_bytes(job: Job, part: Part, stage: int) -> float:
    """Of the weights that one rank holds of a model, adapters and all."""
    if part.shared:
        return weight_bytes(trained_parameters(part, job.grid, stage), job.element) if part.trained else 0.0
    held = weight_bytes(held_parameters(part, job.grid, stage), job.element)
    return held - saved_bytes(part, job.grid, stage, job.element)


def gradient_bytes(count: Count) -> float:
    """`grad_reduce_in_fp32`: one float32 number for each parameter, on every data-parallel rank."""
    return 4.0 * (count.total - count.fixed)


def optimizer_bytes(count: Count, grid: Grid, element: int, distributed: bool, averaged: bool = False) -> float:
    """Adam: two float32 moments, and a float32 main copy of what is bfloat16; the distributed optimizer cuts them over
    the ranks with the same parameters (ZeRO-1; for experts data x context / expert of them). `averaged`: with `ema`'s
    float32 numbers beside them."""
    per, dense, experts = (8 if element == 4 else 12) + 4 * averaged, 1, 1
    if distributed:
        dense, experts = grid.replicas, max(1, grid.replicas // grid.expert)
    plain = 8 * (count.score / dense + count.magnitudes / experts)
    return per * (count.dense / dense + count.experts / experts) + plain


def optimizer_share(count: Count, grid: Grid, distributed: bool) -> float:
    """Parameters whose optimizer state this rank holds."""
    return optimizer_bytes(count, grid, 4, distributed) / 8


def layer_activations(part: Part, grid: Grid, sparse: bool) -> tuple[float, float]:
    """Elements that one layer keeps for backward: (for each own token, for each token of all context-parallel ranks).

    By own token: inputs and outputs of two norms (4 H; a 1/tp share with sequence parallelism), queries and the
    attention's output (2 A / tp; 3 A where context parallelism reorders), gate, up and their product (3 F / tp), keys
    and values (2 K / tp); of latent attention its vectors, twice. An expert's token also keeps its input and output
    (2 H) for each of k. With all-gather, keys and values of the whole row, once as gathered and about once as used."""
    m, tp = part.shape, grid.tensor
    a, k, v, _ = attention_widths(m)
    v = max(v, k)  # fused attention pads narrower ones
    own = 4 * m.hidden_size / (tp if grid.sequence else 1) + (2 if grid.context == 1 else 3) * a / tp
    own += 2 * sum(latent_widths(m)) / (tp if grid.sequence else 1)
    own += 3 * mlp_width(m, sparse) / tp
    if sparse:
        own += m.hidden_size + m.moe.top_k * 2 * m.hidden_size
    if grid.context > 1 and not grid.over_heads:
        return own, (k + v) * (1 + 1 / (2 * grid.context)) / tp
    return own + (k + v) / tp, 0.0


def _linear_activations(part: Part, grid: Grid, sparse: bool) -> tuple[float, float]:
    """`layer_activations` of a layer of linear attention, without `rule_activations`: in place of queries, keys, values
    and output what its products give and take."""
    m, linear = part.shape, part.shape.linear
    a, k, v, _ = attention_widths(m)
    attention = ((2 if grid.context == 1 else 3) * a + k + max(v, k)) / grid.tensor
    own = layer_activations(part, replace(grid, over_heads=True), sparse)[0] - attention
    own += (linear.key_heads * linear.width + 2 * linear.value_heads * linear.value_head_dim) / grid.tensor
    return own, gathered_width(m) / grid.tensor if grid.context > 1 and not grid.over_heads else 0.0


def activation_bytes(job: Job, part: Part, stage: int) -> float:
    """Of the micro-batches that stage `stage` of a 1F1B pipeline holds at a time, min(micro-batches, stages - stage).
    With recomputation each layer keeps its input alone, and one layer at a time the rest. The last layer counts like
    the others: rows may be almost all response."""
    grid, m = job.grid, part.shape
    count, tokens = job.micro_batches(worst=True)
    if part is job.policy:
        more, others = job.ptx_micro_batches(worst=True)
        count, tokens = count + more, max(tokens, others)
    own, share = tokens / grid.context, grid.tensor if grid.sequence else 1
    layers = []
    for sparse, linear in zip(stage_layers(m, grid, stage), stage_linear(m, grid, stage), strict=True):
        per_token, per_gathered = (_linear_activations if linear else layer_activations)(part, grid, sparse)
        per_token += adapter_widths(m, sparse, linear, grid.tensor) if is_adapted(part) else 0
        layers.append(per_token * own + per_gathered * tokens)
        if linear:  # in float32; where others' tokens are gathered, of rows from their beginning
            again = 1 + 1 / (2 * grid.context) if grid.context > 1 and not grid.over_heads else 1 / grid.context
            layers[-1] += rule_activations(m) / grid.tensor * again * tokens * 4 / job.element
    ends = (stage == 0) * m.hidden_size / share + (stage == grid.pipeline - 1) * m.hidden_size * (1 + 1 / share)
    kept = len(layers) * own * m.hidden_size / share if job.recompute else sum(layers)
    in_flight = min(count, grid.pipeline - stage)
    return job.element * (in_flight * (kept + ends * own) + (max(layers) if job.recompute else 0))


def logits_bytes(job: Job, part: Part, tokens: float) -> float:
    """Three float32 numbers for each logit of a part of at most `batch.logits_bytes`; `tokens` that are read."""
    if part.head != "lm":
        return 0.0
    return min(12 * tokens * part.shape.vocab_size / job.grid.tensor, job.logits_bytes)


def _forward_bytes(job: Job, part: Part) -> float:
    """A layer without gradient: the stream, its norm, the widest product and its factors."""
    m, grid = part.shape, job.grid
    tokens = max(job.logprob_tokens, job.rows.longest) / grid.context
    tokens = min(tokens, job.rows.count / grid.data * job.rows.longest / grid.context)
    wide = 3 * widest_mlp(m) / grid.tensor
    return job.element * tokens * (3 * m.hidden_size + wide)


def _models(job: Job, stage: int, reads: tuple[str, ...] = (), trains: bool = False) -> dict[str, float]:
    """What the models hold in a phase that reads the weights of the parts `reads`, and in one that trains: what
    memory.offload names is on the device where it is needed alone (run/phases.py)."""
    items = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for part in job.parts:
        count = trained_parameters(part, job.grid, stage)
        if part.role in reads or "weights" not in job.offload:
            items["weights"] += model_bytes(job, part, stage)
        if part.trained and (trains or "gradients" not in job.offload):
            items["gradients"] += gradient_bytes(count)
        if part.trained and (trains or "optimizer" not in job.offload):
            items["optimizer"] += optimizer_bytes(count, job.grid, job.element, part.distributed, part.averaged)
    return items


def _engine_items(job: Job) -> tuple[dict[str, float], dict[str, float]]:
    """What an engine keeps, and what it needs while it generates."""
    engine, m = job.engine, job.policy.shape
    assert engine is not None
    slots, cache = job.slots()
    tokens = min(PREFILL_TOKENS, job.rows.prompts * job.rows.prompt_longest)
    wide = (m.num_heads + 2 * m.num_kv_heads) * m.kv_channels + 3 * widest_mlp(m)
    logits = slots * m.vocab_size
    weights = engine.element * parameters(m) / engine.tensor
    weights += kept_bytes(m, job.element, engine.tensor) if engine.factors else 0
    return {"engine weights": weights, "kv cache": cache}, {
        "prefill": engine.element * tokens * (wide + 3 * m.hidden_size) / engine.tensor,
        "sampling": 10.0 * logits + 8.0 * min(logits, SAMPLED_LOGITS),
    }


def refit_buffers(job: Job, stage: int) -> float:
    """Of an engine that is written in place: two for the largest message that a rank sends, two for the largest that it
    receives; no pair of ranks exchanges more than what the one holds of the other's share. Else a bucket, and a whole
    tensor twice."""
    engine, grid, m = job.engine, job.grid, job.policy.shape
    assert engine is not None
    if not engine.placed:
        return job.bucket_bytes + 2 * job.element * m.hidden_size * max(m.vocab_size, 2 * m.ffn_hidden_size)
    aligned = engine.tensor == grid.tensor or grid.tensor == 1  # a rank holds what its engine needs of its stage

    def message(sender: int, same: bool) -> float:
        count = rank_parameters(m, grid, sender, "" if m.tie_embeddings else "lm")  # a copy of the embedding stays
        held = count.experts if grid.expert > 1 or not (same and aligned) else 0
        if not (same and aligned):
            held += count.dense
        element = job.element if engine.factors else min(job.element, engine.element)  # of the first refit
        total = element * held * min(1, grid.tensor / engine.tensor)
        return min(total, message_bytes(round(total), int(job.bucket_bytes)))

    received = max(message(sender, sender == stage) for sender in range(grid.pipeline))
    return 2 * (received + message(stage, grid.pipeline == 1))


def plan_memory(job: Job, device: Device, assumed: Assumptions) -> Memory:
    """Each phase on the pipeline stage that needs most in it."""
    limit = device.memory_bytes * assumed.usable
    phases: dict[str, dict[str, float]] = {}
    for stage in range(job.grid.pipeline):
        for phase, items in stage_phases(job, stage).items():
            if phase not in phases or sum(items.values()) > sum(phases[phase].values()):
                phases[phase] = items
    return Memory(phases, assumed.context_bytes, limit)


def stage_phases(job: Job, stage: int) -> dict[str, dict[str, float]]:
    last, stays = stage == job.grid.pipeline - 1, {}
    found: dict[str, dict[str, float]] = {}
    if job.engine is not None:
        kept, needed = _engine_items(job)
        found["generate"] = _models(job, stage) | kept | needed
        if job.engine.resident:
            stays = {name: size for name, size in kept.items() if name != "kv cache" or not job.sleeps}
        found["refit"] = _models(job, stage, ("policy",)) | stays | {"buckets": refit_buffers(job, stage)}
    if job.rollout or job.asked:
        tokens = max(job.logprob_tokens, job.rows.longest) / job.grid.context
        most = most_read(job, tokens, job.rows.count / job.grid.data)
        logits = max((logits_bytes(job, part, most) for part in job.parts), default=0.0) if last else 0.0
        forward = max(_forward_bytes(job, part) for part in job.parts)
        read = _models(job, stage, ("policy", "critic", "reference", "teacher", "teachers"))
        found["logprobs"] = read | stays | {"forward": forward, "logits": logits}
    trained = [part for part in job.parts if part.trained]
    if trained:
        _, tokens = job.micro_batches(worst=True)
        rows = job.learned / job.grid.data
        most = most_read(job, tokens / job.grid.context, rows if job.micro_tokens else min(rows, job.micro_rows))
        base, updates = _models(job, stage, ("policy", "critic"), trains=True) | stays, []
        for part in trained:
            learned = max(most, job.ptx_micro_batches(worst=True)[1] / job.grid.context) if part is job.policy else most
            logits = logits_bytes(job, part, learned) if last else 0.0
            backward = {"activations": activation_bytes(job, part, stage), "logits": logits}
            updates.append(base | backward)  # Adam is fused and needs nothing beside, clipping one tensor at a time
        found["update"] = max(updates, key=lambda items: sum(items.values()))
        found["save"] = base  # from where it lies to host memory (plan/host.py), without a copy on the device
    return found


def _keys(job: Job, phase: str, item: str) -> str:
    """What makes an item smaller in a phase, first what is not yet so."""
    first = []
    if item == "activations" and not job.recompute:
        first.append("model.recompute=full")
    if item == "activations" and job.grid.tensor > 1 and not job.grid.sequence:
        first.append("parallel.sequence=true")
    if item in ("weights", "gradients", "optimizer") and phase != "update" and item not in job.offload:
        first.append(f"memory.offload=[{item}]")
    if item == "kv cache" and phase != "generate":
        first.append("memory.sleep=auto")
    if item == "optimizer" and not all(part.distributed for part in job.parts):
        first.append("optim.distributed=true")
    return ", ".join([*first, ITEMS[item][1]])


def refuse(job: Job, device: Device, memory: Memory) -> None:
    """MemoryPlanError unless the job fits."""
    if memory.fits:
        return
    phase = memory.peak
    items = sorted(memory.phases[phase].items(), key=lambda item: -item[1])[:3]
    text = ", ".join(f"{size / GIB:.1f} GiB {ITEMS[name][0]}" for name, size in items)
    keys = "; ".join(f"{ITEMS[name][0]}: {_keys(job, phase, name)}" for name, _ in items)
    raise MemoryPlanError(
        f"the job does not fit: phase {phase} needs {memory.peak_bytes / GIB:.1f} GiB on a GPU, of the "
        f"{memory.limit_bytes / GIB:.1f} GiB that a program can use of {device.name} ({job.grid.gpus} GPUs, "
        f"{job.grid}). Largest: {text}. Change {keys}"
    )
