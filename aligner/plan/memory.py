"""Bytes on one GPU by phase, and the keys to change where they are too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.config.stages import STAGES
from aligner.errors import AlignerError
from aligner.plan.activations import activation_bytes, backward_bytes
from aligner.plan.adapters import is_adapted, merging_bytes, trained_parameters
from aligner.plan.devices import GIB, Assumptions, Device
from aligner.plan.job import PlanJob, PlannedJudge, PlannedModel
from aligner.plan.reads import most_read
from aligner.plan.shapes import Count, largest_parameter, stage_layers
from aligner.plan.sizes import (
    embedding_bytes,
    engine_items,
    forward_bytes,
    gradient_bytes,
    head_bytes,
    judge_bytes,
    logits_bytes,
    model_bytes,
    moment_bytes,
    muon_bytes,
    optimizer_bytes,
    optimizer_share,
    refit_buffers,
    replaced_bytes,
    teacher_heads,
    user_buffers,
    weight_bytes,
    whole_bytes,
)

SENTINEL_ROWS, SENTINEL_TOKENS, SENTINEL_DECODED = 8, 64, 16  # as in `builders/engines.py`, which imports torch
SCORED_LOGITS = 1 << 25  # as in `engines/native/engine.py`

# item -> (what it is, keys that make it smaller)
ITEMS = {
    "weights": ("weights", "parallel.tensor, parallel.pipeline, parallel.expert"),
    "gradients": ("float32 gradients", "parallel.tensor, parallel.pipeline, parallel.expert"),
    "optimizer": ("optimizer state", "more GPUs, parallel.tensor, parallel.pipeline"),
    "activations": ("activations", "batch.micro_batch_tokens or micro_batch_samples, parallel.context"),
    "logits": ("logits and gradients of their matrix", "batch.logits_bytes, parallel.tensor"),
    "embedding": ("gradients of the embedding", "parallel.tensor, parallel.pipeline"),
    "user buffers": ("buffers of tensor parallelism", "batch.micro_batch_tokens, model.megatron.tp_comm_overlap=false"),
    "backward": ("one layer's gradients", "batch.micro_batch_tokens or micro_batch_samples, parallel.tensor"),
    "matrices": ("gradients and products of Muon", "parallel.tensor, parallel.pipeline, parallel.expert"),
    "heads": ("the teachers' output matrices", "parallel.tensor, algorithm.distill.top_k"),
    "judges": ("the weights of reward.judges", "engine.tensor_parallel, engine.dtype"),
    "engine weights": ("the engine's weights", "engine.tensor_parallel, engine.dtype"),
    "draft model": ("the model of engine.draft_model", "engine.dtype"),
    "kv cache": ("the engine's KV cache", "engine.kv_cache_bytes, engine.max_batch"),
    "prefill": ("prefill", "engine.tensor_parallel"),
    "sampling": ("logits being sampled", "engine.max_batch"),
    "buckets": ("tensors on their way to the engine", "refit.bucket_bytes"),
    "sentinel": ("logits that verify a refit", "parallel.tensor, batch.logits_bytes"),
    "merging": ("a matrix that adapters are merged with", "parallel.tensor, parallel.expert"),
    "forward": ("one layer's forward pass", "batch.logprob_tokens, parallel.tensor, parallel.context"),
}


Phases = dict[str, dict[str, float]]  # of a rank: phase -> item -> bytes


class MemoryPlanError(AlignerError):
    """A configuration that cannot fit; names the largest items and the keys to change."""


@dataclass(frozen=True)
class Memory:
    """Memory by phase. `phases`: phase -> item -> bytes, of the GPU that needs most in that phase."""

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


def _forward_tokens(job: PlanJob, rows: float) -> float:
    """Return the tokens of one pass over so many rows."""
    return min(max(job.logprob_tokens, job.rows.longest), rows * job.rows.longest) / job.grid.context


def _models(job: PlanJob, stage: int, reads: tuple[str, ...] = (), trains: bool = False) -> dict[str, float]:
    """Return the models' bytes by item in a phase that reads the weights of the roles `reads`, and in one that trains.
    Tensors of `memory.offload` are on the device only where they are needed (run/phases.py)."""
    items = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for model in job.models:
        count = trained_parameters(model, job.grid, stage)
        if model.role in reads or "weights" not in job.offload:
            items["weights"] += model_bytes(job, model, stage)
        if model.trained and (trains or "gradients" not in job.offload):
            items["gradients"] += gradient_bytes(count, model.gradient)
        if model.trained and (trains or "optimizer" not in job.offload):
            kinds = model.distributed, model.averaged, moment_bytes(model, job.grid, stage)
            items["optimizer"] += optimizer_bytes(count, job.grid, job.element, *kinds)
    if heads := sum(teacher_heads(job)):
        items["heads"] = heads
    if (own := judge_bytes(job)) and ("judge" in reads or "weights" not in job.offload):
        items["judges"] = own
    return items


def _building(job: PlanJob, stage: int) -> dict[str, float]:
    """Return the largest moment while the models are built, one after the other, the reward model first.

    Matrices are whole before they are held in fewer bits or replaced by the policy's. Megatron's buffers of weights and
    gradients of trained models exist beside the weights that they replace. The engine comes last. Moments of the
    optimizer come with its first step."""
    weights = gradients = optimizer = engine = 0.0
    moments = []
    for model in sorted(job.models, key=lambda model: model.name != "reward"):
        made = model.trained or not model.shared
        dense = made * (whole_bytes(job, model, stage) + replaced_bytes(job, model, stage))
        moments.append((weights + dense, gradients, optimizer, engine))
        weights += model_bytes(job, model, stage)
        if model.trained:
            count = trained_parameters(model, job.grid, stage)
            for own in (count._replace(experts=0), Count(experts=count.experts)):  # buffers, one after the other
                gradients += gradient_bytes(own, model.gradient)
                beside = model.distributed * weight_bytes(own, job.element)
                moments.append((weights + beside, gradients, optimizer, engine))
            optimizer += 4 * optimizer_share(count, job.grid, model.distributed) * (job.element < 4)
            moments.append((weights, gradients, optimizer + _main_copy(job, model, count, stage), engine))
    for head in teacher_heads(job):  # the teacher's shard, the student's shares of it, and these together
        moments.append((weights + 3 * head, gradients, optimizer, engine))
        weights += head
    if job.engine is not None and not job.engine.ranks:
        engine = _made_engine(job)
    moments.append((weights, gradients, optimizer, engine))
    return dict(zip(("weights", "gradients", "optimizer", "engine weights"), max(moments, key=sum), strict=True))


def _made_engine(job: PlanJob) -> float:
    """Return the bytes of an engine's weights while it is made. In the rank's own process they are gone again until
    the first refit, and each layer's experts before the next layer's are made."""
    m, engine = job.policy.shape, job.engine
    assert engine is not None
    kept = engine_items(job)[0]
    whole = kept["engine weights"] + kept.get("draft model", 0.0)
    if engine.reserved:
        return whole * engine.early
    matrices = (1 + m.mlp_parts) * m.expert_ffn * m.expert_hidden if m.moe.num_experts else 0
    others = len(m.layers_of("sparse")) - 1
    return whole - engine.element * max(0, others) * m.moe.num_experts * matrices / engine.tensor


def _main_copy(job: PlanJob, model: PlannedModel, count: Count, stage: int) -> float:
    """Return the bytes of the copy that Megatron's distributed optimizer makes of a parameter's share before it makes
    the float32 one: of the largest."""
    if job.element == 4 or not model.distributed or is_adapted(model):
        return 0.0
    share = max(count.dense / job.grid.replicas, count.experts / job.grid.expert_replicas)
    return job.element * min(share, largest_parameter(model.shape, job.grid, stage, model.head))


def plan_memory(job: PlanJob, device: Device, assumed: Assumptions) -> Memory:
    """Return each phase on the pipeline stage, or the rank that only generates, that needs most in it."""
    return most_of(training(job) + generating(job), device, assumed)


def training(job: PlanJob) -> list[Phases]:
    """Return the phases of a rank of each pipeline stage, of those with the same layers only of the first, which holds
    most micro-batches."""
    last, first = job.grid.pipeline - 1, dict[Any, int]()
    for stage in range(job.grid.pipeline):
        layers = [stage_layers(model.shape, job.grid, stage) for model in job.models]
        first.setdefault((*layers, stage == 0, stage == last), stage)
    return [stage_phases(job, stage) for stage in first.values()]


def generating(job: PlanJob) -> list[Phases]:
    """Return the phases of a rank that only generates, if there are such ranks."""
    return [engine_phases(job)] if job.engine is not None and job.engine.ranks else []


def most_of(ranks: list[Phases], device: Device, assumed: Assumptions) -> Memory:
    """Return each phase of the rank that needs most in it."""
    phases: Phases = {}
    for one in ranks:
        for phase, items in one.items():
            if phase not in phases or sum(items.values()) > sum(phases[phase].values()):
                phases[phase] = items
    return Memory(phases, assumed.context_bytes, device.memory_bytes * assumed.usable)


def engine_phases(job: PlanJob) -> dict[str, dict[str, float]]:
    """Return the phases of a rank that only generates."""
    kept, needed = engine_items(job)
    phases = {"build": {"engine weights": _made_engine(job)}, "generate": kept | needed}
    moved = max(
        {"buckets": refit_buffers(job, None)}, _verification(job, False, True), key=lambda items: sum(items.values())
    )
    phases["refit"] = _stays(job, kept) | moved
    asked = [kept | needed for kept, needed in (engine_items(job.asked_by(j)) for j in job.judges if not j.model)]
    if asked:
        phases["score"] = max(asked, key=lambda items: sum(items.values()))
    return phases


def _stays(job: PlanJob, kept: dict[str, float]) -> dict[str, float]:
    """Return the engine's items that it keeps while others work."""
    return {name: size for name, size in kept.items() if name != "kv cache" or not job.sleeps}


def stage_phases(job: PlanJob, stage: int) -> dict[str, dict[str, float]]:
    """Return the phases of a rank that trains."""
    last, stays = stage == job.grid.pipeline - 1, {}
    every = (*(model.role for model in job.models), "judge")
    phases = {"build": _building(job, stage), "load": _models(job, stage, every, trains=True)}  # before offload begins
    if job.engine is not None:
        if not job.engine.ranks:
            kept, needed = engine_items(job)
            if job.engine.reserved:  # else it has none before the first refit
                phases["load"] |= {name: size * job.engine.early for name, size in kept.items()}
            phases["generate"] = _models(job, stage) | kept | needed
            stays = _stays(job, kept)
        moved = {"buckets": refit_buffers(job, stage)}
        if merging := merging_bytes(job.policy, job.grid, stage, job.element):
            moved["merging"] = merging
        moved = max(moved, _verification(job, last, not job.engine.ranks), key=lambda items: sum(items.values()))
        phases["refit"] = _models(job, stage, ("policy",)) | stays | moved
    scores = [_asked(job, stage, judge, stays) for judge in job.judges if not judge.engine.ranks]
    if models := [model for model in job.models if model.name == "reward"]:
        scores.append(_read(job, stage, models, ("reward",), job.rows.count / job.grid.data) | stays)
    if scores:
        phases["score"] = max(scores, key=lambda items: sum(items.values()))
    if stays and not job.engine.resident:  # a refit comes before the engine's next use
        stays.pop("engine weights")
    if job.asked:
        asked = job.learned if STAGES[job.stage].pairs else job.rows.count
        there = ("policy", "critic", "reference", "teacher", "teachers")
        phases["logprobs"] = _read(job.taught, stage, job.asked, there, asked / job.grid.data) | stays
    trained = [model for model in job.models if model.trained]
    if trained:
        _, tokens = job.micro_batches(worst=True)
        rows = job.learned / job.grid.data
        most = most_read(job, tokens / job.grid.context, rows if job.micro_tokens else min(rows, job.micro_rows))
        base, updates = _models(job, stage, ("policy", "critic"), trains=True) | stays, []
        for model in trained:
            learned = (
                max(most, job.ptx_micro_batches(worst=True)[1] / job.grid.context) if model is job.policy else most
            )
            kept = base | {"activations": activation_bytes(job, model, stage)}
            if last:
                updates.append(kept | {"logits": head_bytes(job, model, learned)})
            updates.append(kept | {"backward": backward_bytes(job, model, stage)})
            if stage == 0:
                updates.append(base | {"embedding": embedding_bytes(job, model)})
            if model.muon:
                updates.append(base | {"matrices": muon_bytes(model, job.grid, stage)})
        # Adam is fused and needs nothing beside, clipping one tensor at a time
        phases["update"] = max(updates, key=lambda items: sum(items.values()))
        phases["save"] = base  # from where it lies to host memory (plan/host.py), without a copy on the device
    if size := user_buffers(job):
        phases = {name: items | {"user buffers": size} for name, items in phases.items()}
    return phases


def _read(
    job: PlanJob, stage: int, models: Sequence[PlannedModel], there: tuple[str, ...], rows: float
) -> dict[str, float]:
    """Return the bytes while these models read a rank's rows without gradient, with the weights of `there`. They are
    one layer's pass or, if that is more, logits and the last hidden states that they are made of."""
    tokens = _forward_tokens(job, rows)
    made = stage == job.grid.pipeline - 1 and not job.compares  # else the update makes logits of kept hidden states
    logits = max(logits_bytes(job, model, most_read(job, tokens, rows)) for model in models) if made else 0.0
    logits += job.element * tokens * job.policy.shape.hidden_size
    forward = max(forward_bytes(job, model, stage, tokens) for model in models)
    work = {"forward": forward} if forward > logits else {"logits": logits}
    averages = job.compares and job.policy.averaged and job.policy in models  # in place of the weights
    return _models(job, stage, there, averages) | work


def _verification(job: PlanJob, trainer: bool, engine: bool) -> dict[str, float]:
    """Return the logits that verify a refit: of its rows, by the trainer's last stage and by the engine, one after the
    other. They are float32, with their temporaries."""
    m = job.policy.shape
    assert job.engine is not None
    decoded = min(SENTINEL_DECODED, job.rows.response_longest) * job.engine.reserved
    tokens = SENTINEL_ROWS * (min(SENTINEL_TOKENS, job.rows.prompt_longest) + decoded)
    by_engine = 8.0 * min(tokens * m.vocab_size, SCORED_LOGITS)
    by_trainer = logits_bytes(job, job.policy, tokens / job.grid.context)
    return {"sentinel": max(engine * by_engine, trainer * by_trainer)}


def _asked(job: PlanJob, stage: int, judge: PlannedJudge, stays: dict[str, float]) -> dict[str, float]:
    """Return the bytes while a judge replies. The run's engine sleeps, if it does, where no judge asks it."""
    kept, needed = engine_items(job.asked_by(judge))
    cache = kept["kv cache"]
    apart = job.engine is not None and job.engine.ranks
    if judge.model and not apart and not (job.sleeps and all(one.model for one in job.judges)):
        cache += engine_items(job)[0]["kv cache"]
    return _models(job, stage, ("reward", "judge")) | stays | needed | {"kv cache": cache}


def _keys(job: PlanJob, phase: str, item: str) -> str:
    """Return the keys that make an item smaller in a phase, those not yet set first."""
    first = []
    if item == "activations" and not job.recompute:
        first.append("model.recompute=full")
    if item == "activations" and job.grid.tensor > 1 and not job.grid.sequence:
        first.append("parallel.sequence=true")
    if item == "judges" and phase != "score" and "weights" not in job.offload:
        first.append("memory.offload=[weights]")
    movable = ("weights", "gradients", "optimizer") if phase not in ("build", "load", "update") else ()
    if item in movable and item not in job.offload:
        first.append(f"memory.offload=[{item}]")
    if item == "kv cache" and phase != "generate":
        first.append("memory.sleep=auto")
    if item == "optimizer" and not all(model.distributed or model.muon for model in job.models):
        first.append("optim.distributed=true")
    keys = ", ".join([*first, ITEMS[item][1]])
    return keys if job.policy.shape.moe.num_experts else keys.replace(", parallel.expert", "")


def refuse(job: PlanJob, device: Device, memory: Memory) -> None:
    """Raise MemoryPlanError unless the job fits."""
    if memory.fits:
        return
    phase = memory.peak
    items = sorted(memory.phases[phase].items(), key=lambda item: -item[1])[:3]
    text = ", ".join(f"{size / GIB:.1f} GiB {ITEMS[name][0]}" for name, size in items)
    keys = "; ".join(f"{ITEMS[name][0]}: {_keys(job, phase, name)}" for name, _ in items)
    raise MemoryPlanError(
        f"the job does not fit: phase {phase} needs {memory.peak_bytes / GIB:.1f} GiB on a GPU, of the "
        f"{memory.limit_bytes / GIB:.1f} GiB that a program can use of {device.name} ({job.gpus} GPUs, "
        f"{job.grid}). Largest: {text}. Change {keys}"
    )
