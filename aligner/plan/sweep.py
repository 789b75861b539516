"""Every layout of a config on so many GPUs that divides and fits, each with its fastest sizes, the fastest first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

from aligner.config.checks import AUTO
from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.config.validate import validate_layout
from aligner.errors import ConfigError
from aligner.plan.devices import Assumptions, Device
from aligner.plan.job import PlanJob
from aligner.plan.memory import Memory, plan_memory
from aligner.plan.prediction import Prediction, predict

VIRTUAL = (2, 3, 4, 6, 8)  # numbers of virtual stages to try
FASTER = 0.99  # of a step: an improvement that is worth more messages


def candidates(shape: ModelConfig, gpus: int, gpus_per_node: int) -> Iterator[ParallelConfig]:
    """Yield layouts. Tensor ranks stay in a node. Sequence parallelism is on wherever there are tensor ranks."""

    def divisors(n: int, most: int) -> list[int]:
        return [d for d in range(1, min(n, most) + 1) if n % d == 0]

    for tp in divisors(gpus_per_node, gpus):
        for pp in divisors(gpus // tp, shape.num_layers):
            for cp in (1, 2, 4, 8, 16):
                for ep in divisors(shape.moe.num_experts, gpus_per_node * 8) if shape.moe.num_experts else (1,):
                    yield ParallelConfig(tp, pp, context=cp, expert=ep, sequence=tp > 1)


def sweep(
    cfg: Config, shape: ModelConfig, gpus: int, device: Device, gpus_per_node: int, job_for: Callable[[Config], PlanJob]
) -> tuple[list[Prediction], Memory | None]:
    """Return the predictions of the layouts that fit, fastest first, and the smallest memory of those that do not. Each
    is tried without recomputation, with as little as fits at the configured sizes, and with all; and pipelines with
    more virtual stages while these make a step faster."""
    predictions: list[Prediction] = []
    nearest: Memory | None = None
    shape = replace(shape, init="random")  # it is known: nothing is read from folders again

    def fitting(one: Config, recompute: str | int) -> list[Prediction]:
        """Return the fastest of the sizes that fit, if any does."""
        nonlocal nearest
        jobs = []
        for job in _sizes(replace(one, model=replace(shape, recompute=str(recompute))), job_for):
            memory = plan_memory(job, device, Assumptions())
            if memory.fits:
                jobs.append(job)
            elif nearest is None or memory.peak_bytes < nearest.peak_bytes:
                nearest = memory
        turns = [n for n in VIRTUAL if one.parallel.pipeline > 1 and _is_valid(_virtual(one, n), gpus)]
        fastest = [_interleaved(job, turns, device) for job in jobs]
        return sorted(fastest, key=lambda p: p.step_s)[:1]

    keeps = shape.passes_beside or shape.recomputed_modules  # then whole layers are not recomputed
    for parallel in candidates(shape, gpus, gpus_per_node):
        one = replace(cfg, parallel=parallel, model=shape)  # a critic has its policy's layout
        if not _is_valid(one, gpus):
            continue
        least = fitting(one, "none" if keeps else "full")
        predictions += least
        if least and not keeps:
            most = -(-shape.num_layers // parallel.pipeline)

            def fits(layers: int) -> bool:
                recomputing = replace(one, model=replace(shape, recompute=str(layers or "none")))  # noqa: B023
                return plan_memory(job_for(recomputing), device, Assumptions()).fits

            fewest = bisect_left(range(most), True, key=fits)
            for recompute in ("none", *[fewest] * (0 < fewest < most)):
                predictions += fitting(one, recompute)
    return sorted(predictions, key=lambda p: p.step_s), nearest


def _is_valid(cfg: Config, gpus: int) -> bool:
    try:
        validate_layout(cfg, gpus)
    except ConfigError:
        return False
    return True


def _virtual(cfg: Config, stages: int) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, virtual_stages=stages))


def _interleaved(job: PlanJob, turns: list[int], device: Device) -> Prediction:
    """Return the prediction of the job, or of the fastest number of virtual stages up to the first of no use."""
    best = predict(job, device)
    for virtual in turns:
        again = predict(replace(job, grid=replace(job.grid, virtual=virtual)), device)
        if not again.memory.fits or again.step_s > FASTER * best.step_s:
            break
        best = again
    return best


def _sizes(cfg: Config, job_for: Callable[[Config], PlanJob]) -> Iterator[PlanJob]:
    """Yield the job as the config says; with the cache and the micro-batches that the memory allows; and with smaller
    micro-batches, as a pipeline may want more of them."""
    configured = job_for(cfg)
    yield configured
    free = replace(cfg.batch, micro_batch_samples=AUTO, micro_batch_tokens=0, logprob_tokens=AUTO)
    fitted = job_for(replace(cfg, batch=free, engine=replace(cfg.engine, kv_cache_bytes=AUTO)))
    if fitted != configured:
        yield fitted
    if fitted.micro_tokens and cfg.parallel.pipeline > 1:
        for tokens in (fitted.micro_tokens // 2, fitted.micro_tokens // 4):
            if tokens >= fitted.rows.longest:
                yield replace(fitted, micro_tokens=tokens)
