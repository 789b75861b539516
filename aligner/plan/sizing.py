"""Sizes that `auto` stands for. They change no numbers, only speed: the engine's cache, micro-batches, and passes
without gradient. They are the same on equal machines, as they depend on total memory, not on free memory.

On a GPU: the largest for which every phase has room by `plan_memory`. On a CPU, whose memory others use too: sizes that
were fast enough (docs/explanation/memory.md), less on a small machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil, inf

from aligner.config.checks import AUTO
from aligner.config.derived import data_parallel, minibatch_samples, undecided
from aligner.config.schema import Config
from aligner.config.sections.batch import LOGPROB_TOKENS, ROWS
from aligner.config.sections.engine import CACHE_BYTES
from aligner.config.stages import STAGES
from aligner.plan.activations import activation_bytes
from aligner.plan.devices import Assumptions, Device
from aligner.plan.job import PlanJob, PlannedRows, job_of, shape_at
from aligner.plan.memory import Phases, generating, training

KEYS = ("engine.kv_cache_bytes", "batch.micro_batch_samples", "batch.micro_batch_tokens", "batch.logprob_tokens")
TOKENS = tuple(1 << n for n in range(15, 7, -1))  # of a micro-batch, the most first: products gain nothing above
CPU_TOKENS, CPU_SHARE = 16384, 8  # on a CPU; a cache, and activations, each get one in so many of a rank's bytes
VOCABULARY = 1 << 17  # where only the tokenizer knows how large it is
MICRO_BATCHES = 4  # at least so many for each stage of a pipeline, which else waits for itself
UNIT = 64 << 20  # a cache is a multiple of it
HEADROOM, CHILD_HEADROOM = 0.95, 0.85  # of what is left, for the cache; an engine's own process has a context, too
AWAKE_SHARE = 0.2  # of the memory, that micro-batches leave to a cache that does not sleep


@dataclass(frozen=True)
class Room:
    """Bytes of memory for each rank that trains, and for each that only generates."""

    trainer: float
    engine: float
    cuda: bool

    @classmethod
    def of(cls, device: Device) -> Room:
        return cls(device.memory_bytes, device.memory_bytes, True)


def sized(cfg: Config, ranks: int, room: Room, engine_tensor: int = 0) -> Config:
    """Return the config with numbers in place of `auto`. `engine_tensor`, and errors: see `job_of`."""
    if not undecided(cfg):
        return cfg
    known = shape_at(cfg.model, cfg.model.init).vocab_size
    shaped = cfg if known else replace(cfg, model=replace(cfg.model, vocab_size=VOCABULARY))
    job = job_of(shaped, ranks, engine_tensor=engine_tensor)
    job = (_on_gpu if room.cuda else _on_cpu)(cfg, job, room)
    batch, engine = cfg.batch, cfg.engine
    if batch.sizes_itself:
        by_tokens = batch.packing or cfg.parallel.expert == 1
        share = {"micro_batch_tokens": job.micro_tokens} if by_tokens else {"micro_batch_samples": _rows(cfg, ranks)}
        batch = replace(batch, **share)
    if batch.logprob_tokens == AUTO:
        batch = replace(batch, logprob_tokens=job.logprob_tokens)
    if engine.kv_cache_bytes == AUTO:
        cache = job.engine.kv_bytes if job.engine else CACHE_BYTES if room.cuda else cpu_cache(room)
        engine = replace(engine, kv_cache_bytes=int(cache))
    return replace(cfg, batch=batch, engine=engine)


def _rows(cfg: Config, ranks: int) -> int:
    """Return the rows of a micro-batch that is not sized by tokens: the most that divide a rank's share evenly."""
    stage = STAGES[cfg.stage.name]
    each = minibatch_samples(cfg) if stage.rollouts and not stage.pairs else cfg.batch.prompts
    share = max(1, (each if stage.rollouts else cfg.batch.sequences) // data_parallel(cfg, ranks))
    return next(n for n in range(min(ROWS, share), 0, -1) if share % n == 0)


def _cached(job: PlanJob, size: float) -> PlanJob:
    return job if job.engine is None else replace(job, engine=replace(job.engine, kv_bytes=float(size)))


def _on_gpu(cfg: Config, job: PlanJob, room: Room) -> PlanJob:
    own = cfg.engine.kv_cache_bytes == AUTO
    asleep = _cached(job, UNIT if job.sleeps else AWAKE_SHARE * room.trainer) if own else job
    longest = job.rows.longest
    if cfg.batch.sizes_itself:
        rows = job.learned / job.grid.data
        stages = job.grid.pipeline
        most = rows * longest / (MICRO_BATCHES * stages if stages > 1 else 1)
        tokens = [n for n in TOKENS if n >= longest and (n <= most or n < 2 * longest)] or [longest]
        asleep = _first((replace(asleep, micro_tokens=n) for n in tokens), cfg, room)
    if cfg.batch.logprob_tokens == AUTO:
        passes = [n for n in TOKENS if n <= LOGPROB_TOKENS]
        fitting = _first((replace(asleep, logprob_tokens=n) for n in passes), cfg, room)
        asleep = fitting if _fits(fitting, room, cfg.memory.limit_of) else asleep  # else another size is too large
    return _with_cache(asleep, room, cfg.memory.limit_of) if own and job.engine is not None else asleep


def _first(jobs: Iterable[PlanJob], cfg: Config, room: Room) -> PlanJob:
    """Return the first job that fits, else the last."""
    for job in jobs:
        if _fits(job, room, cfg.memory.limit_of):
            break
    return job


def _fits(job: PlanJob, room: Room, limit_of: Callable[[str], float]) -> bool:
    """Return whether every phase fits. `limit_of`: bytes that a phase may use, 0: all."""
    assumed = Assumptions()

    def within(ranks: list[Phases], memory: float) -> bool:
        limit = memory * assumed.usable - assumed.context_bytes
        needed = ((name, sum(items.values())) for phases in ranks for name, items in phases.items())
        return all(size <= min(limit, limit_of(name) or inf) for name, size in needed)

    return within(training(job), room.trainer) and within(generating(job), room.engine)


def largest_cache(job: PlanJob, trainer: float, engine: float) -> PlanJob:
    """Return the job with the largest cache that fits GPUs of these bytes."""
    return _with_cache(job, Room(trainer, engine, cuda=True), lambda phase: 0)


def _with_cache(job: PlanJob, room: Room, limit_of: Callable[[str], float]) -> PlanJob:
    """Return the job with the largest cache that fits even if rows fill it, as those of an evaluation or on fewer ranks
    may, but no larger than all rows at once need."""
    high, full = whole_cache(job), replace(job, evaluated=_at_once(job, job.rows))
    if _fits(_cached(full, high), room, limit_of):
        return _cached(job, high)
    count = _most(lambda n: _fits(_cached(full, n * UNIT), room, limit_of), int(high // UNIT))
    share = CHILD_HEADROOM if job.engine is not None and job.engine.reserved else HEADROOM
    return _cached(job, max(1, int(share * count)) * UNIT if count else CACHE_BYTES)


def whole_cache(job: PlanJob) -> float:
    """Return the bytes with which `engine.max_batch` rows are decoded together: of rollouts and judges' questions, even
    if a rollout has fewer, as an evaluation may have more. It is no less than on any machine."""
    assert job.engine is not None
    free = replace(job.engine, kv_bytes=float(1 << 60), reserved=False)
    most = 0.0
    for rows in (job.rows, *(judge.rows for judge in job.judges if not judge.model)):
        most = max(most, replace(job, engine=free, rows=_at_once(job, rows)).slots()[1])
    return max(float(CACHE_BYTES), ceil(most / UNIT) * UNIT)


def _at_once(job: PlanJob, rows: PlannedRows) -> PlannedRows:
    """Return at least as many such rows as `engine.max_batch` allows."""
    assert job.engine is not None
    count = max(rows.count, ceil(job.engine.max_batch * job.replicas))
    return replace(rows, count=count, prompts=max(rows.prompts, count))


def _most(holds: Callable[[int], bool], high: int) -> int:
    """Return the largest number from 0 to `high` for which it holds, as it does for all below."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def cpu_cache(room: Room) -> int:
    return max(1, min(CACHE_BYTES, int(room.engine / CPU_SHARE)) // UNIT) * UNIT


def _on_cpu(cfg: Config, job: PlanJob, room: Room) -> PlanJob:
    """Return the job with sizes for a CPU, whose numbers are float32 with any config."""
    share = room.trainer / CPU_SHARE
    wide = replace(job, element=4)

    def needs(tokens: int) -> float:
        one = replace(wide, micro_tokens=tokens)
        return max((activation_bytes(one, model, 0) for model in one.models if model.trained), default=0.0)

    tokens = next((n for n in TOKENS if n <= CPU_TOKENS and needs(n) <= share), TOKENS[-1])
    job = replace(job, micro_tokens=tokens if cfg.batch.sizes_itself else job.micro_tokens)
    if cfg.batch.logprob_tokens == AUTO:
        job = replace(job, logprob_tokens=LOGPROB_TOKENS if room.trainer >= 4 << 30 else LOGPROB_TOKENS // 4)
    if cfg.engine.kv_cache_bytes == AUTO:
        job = _cached(job, cpu_cache(room))
    return job


def taken_over(cfg: Config, earlier: Config) -> Config:
    """Take for `auto` the sizes of `earlier`, so that a run resumes with the same numbers bit-for-bit."""
    batch, engine = cfg.batch, cfg.engine
    if batch.sizes_itself and not earlier.batch.sizes_itself:
        was = earlier.batch
        batch = replace(batch, micro_batch_samples=was.micro_batch_samples, micro_batch_tokens=was.micro_batch_tokens)
    if batch.logprob_tokens == AUTO:
        batch = replace(batch, logprob_tokens=earlier.batch.logprob_tokens)
    if engine.kv_cache_bytes == AUTO:
        engine = replace(engine, kv_cache_bytes=earlier.engine.kv_cache_bytes)
    return replace(cfg, batch=batch, engine=engine)
