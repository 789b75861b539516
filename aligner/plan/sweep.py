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
    is tried without recomputation, with as little as fits at the configured sizes, and with all."""
    predictions: list[Prediction] = []
    nearest: Memory | None = None

    def recomputing(recompute: str | int) -> Config:
        return replace(one, model=replace(shape, init="random", recompute=str(recompute or "none")))

    def fits(layers: int) -> bool:
        return plan_memory(job_for(recomputing(layers)), device, Assumptions()).fits

    for parallel in candidates(shape, gpus, gpus_per_node):
        # a critic has its policy's layout; shapes are known, so nothing is read from folders again
        one = replace(cfg, parallel=parallel, model=replace(shape, init="random"))
        try:
            validate_layout(one, gpus)
        except ConfigError:
            continue
        most = -(-shape.num_layers // parallel.pipeline)
        fewest = 0 if shape.passes_beside else bisect_left(range(most), True, key=fits)
        layers = [*["full"] * (not shape.passes_beside), *[fewest] * (0 < fewest < most)]  # it cannot be recomputed
        for recompute in ("none", *layers):
            fitting = []
            for job in _sizes(recomputing(recompute), job_for):
                memory = plan_memory(job, device, Assumptions())
                if memory.fits:
                    fitting.append(predict(job, device))
                elif nearest is None or memory.peak_bytes < nearest.peak_bytes:
                    nearest = memory
            if fitting:
                predictions.append(min(fitting, key=lambda p: p.step_s))
    return sorted(predictions, key=lambda p: p.step_s), nearest


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
