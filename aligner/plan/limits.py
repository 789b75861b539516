"""The key that limits a phase: the one whose other value makes the phase fastest and still fits the memory. Where there
is none: the kind of work that takes most of its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from aligner.config.identity import uses
from aligner.plan.job import PlanJob
from aligner.plan.memory import plan_memory
from aligner.plan.sizing import TOKENS, UNIT, largest_cache, whole_cache
from aligner.plan.times import Machine, PhaseTime, generate_phase, update_phase

WORTH = 0.95  # of a phase's seconds: a change that saves less is not reported
GRADUAL = 2  # micro-batches and rows are tried so many times as large, or as small

# where most of a phase's time goes -> the keys that change it; `step`: the key of an optimizer step's samples
PARTS = {
    "bubble": "parallel.pipeline",
    "tp communication": "parallel.tensor",
    "cp communication": "parallel.context",
    "ep communication": "parallel.expert",
    "pp communication": "parallel.pipeline",
    "dp communication": "{step} (more samples in an optimizer step)",
    "edp communication": "{step} (more samples in an optimizer step)",
    "ends communication": "parallel.pipeline",
    "engines communication": "engine.tensor_parallel",
    "optimizer": "optim.distributed, {step}",
    "Muon": "{step} (more samples in an optimizer step), optim.name=adam",
    "kernels": "operations (more GPUs, or a smaller model)",
    "prefill": "operations (more GPUs, or a smaller model)",
    "drafts": "engine.draft_tokens",
    "decode": "memory bandwidth (more GPUs, engine.tensor_parallel)",
    "copy": "engine.tensor_parallel",
    "tensors": "the number of tensors (engine.name=native takes weights in place)",
    "host": "the engine's own process (engine.name=native has none)",
}
CACHE = (
    "the memory that is left to engine.kv_cache_bytes (memory.offload=[gradients,optimizer], engine.tensor_parallel)"
)
STEP = ("batch.minibatch_samples", "batch.prompts", "batch.sequences")  # the first that the stage reads
Change = tuple[str, int, PlanJob]  # key, its value, the job with it


@dataclass(frozen=True)
class Limit:
    phase: str
    seconds: float
    key: str
    value: int = 0  # 0: no value of it alone that fits would help
    then_s: float = 0.0

    def __str__(self) -> str:
        text = f"{self.phase} is limited by {self.key}"
        return f"{text}: {self.value} takes {self.then_s:.1f} s, not {self.seconds:.1f}" if self.value else text


def limits(job: PlanJob, machine: Machine, phases: dict[str, PhaseTime]) -> list[Limit]:
    limiting = []
    for name, phase in phases.items():
        if phase.seconds <= 0:
            continue
        best = Limit(name, phase.seconds, "", 0, WORTH * phase.seconds)
        if name in _TRIED:
            changes, seconds = _TRIED[name]
            for key, value, changed in changes(job, machine):
                then_s = seconds(changed, machine).seconds
                if then_s < best.then_s and plan_memory(changed, machine.device, machine.assumed).fits:
                    best = replace(best, key=key, value=value, then_s=then_s)
        limiting.append(best if best.key else Limit(name, phase.seconds, _largest(job, name, phase)))
    return limiting


def _largest(job: PlanJob, name: str, phase: PhaseTime) -> str:
    """Return the key for where most of a phase's time goes, if no other value of a key helps."""
    if name == "generate" and job.slots()[0] < min(job.engine.max_batch, ceil(job.rows.count / job.replicas)):
        return CACHE
    largest = max(phase.parts, key=phase.parts.__getitem__).removeprefix("judges' ")
    if name == "generate" and "communication" in largest:
        return "engine.tensor_parallel"
    return PARTS[largest].format(step=next(key for key in STEP if uses(job.stage, key)))


def _generating(job: PlanJob, machine: Machine) -> Iterator[Change]:
    engine = job.engine
    assert engine is not None
    cached = largest_cache(job, machine.device.memory_bytes, machine.device.memory_bytes)
    filled = ceil(cached.slots()[1] / UNIT) * UNIT  # rows of a rollout leave the rest of a budget empty
    if filled > engine.kv_bytes:
        yield "engine.kv_cache_bytes", filled, replace(job, engine=replace(engine, kv_bytes=float(filled)))
    rows = ceil(job.rows.count / job.replicas)
    if job.slots()[0] == engine.max_batch < rows:
        most = min(rows, GRADUAL * engine.max_batch)
        larger = replace(job, engine=replace(engine, max_batch=most))
        if engine.kv_bytes >= whole_cache(job):  # `auto` grows with the rows
            larger = largest_cache(larger, machine.device.memory_bytes, machine.device.memory_bytes)
        yield "engine.max_batch", most, larger


def _updating(job: PlanJob, machine: Machine) -> Iterator[Change]:
    """Yield the job with other sizes of micro-batches: of twice and half as many tokens, and so on."""
    now = job.micro_tokens or job.micro_rows * job.rows.longest
    for tokens in TOKENS:
        if tokens >= job.rows.longest and tokens not in (now, job.micro_tokens):
            yield "batch.micro_batch_tokens", tokens, replace(job, micro_tokens=tokens)


_TRIED: dict[str, tuple[Callable[[PlanJob, Machine], Iterator[Change]], Callable[[PlanJob, Machine], PhaseTime]]] = {
    "generate": (_generating, generate_phase),
    "update": (_updating, update_phase),
}
