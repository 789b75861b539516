"""Every layout of a config on so many GPUs that divides and fits, each with its fastest sizes and ranks of an engine,
the fastest first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from aligner.config.checks import AUTO
from aligner.config.derived import generates
from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.config.validate import validate_engines, validate_layout
from aligner.errors import ConfigError
from aligner.plan.devices import Assumptions, Device
from aligner.plan.job import PlanJob
from aligner.plan.memory import Memory, plan_memory
from aligner.plan.prediction import Prediction, predict

VIRTUAL = (2, 3, 4, 6, 8)  # numbers of virtual stages to try
ENGINE_NODES = 4  # that one engine may have
WITH_ENGINES = 3  # layouts, the fastest ones, that are tried with engines of other numbers of ranks
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


def widths(cfg: Config, gpus: int, gpus_per_node: int) -> list[int]:
    """Return numbers of an engine's ranks to try, the config's first."""
    powers = (1 << n for n in range(min(gpus, ENGINE_NODES * gpus_per_node).bit_length()))
    return list(dict.fromkeys([cfg.engine.tensor_parallel, *(powers if generates(cfg) else ())]))


@dataclass
class Sweep:
    """Every layout on so many GPUs, and what is known of it. `job_for`: see `command.py`."""

    gpus: int
    device: Device
    gpus_per_node: int
    job_for: Callable[[Config], PlanJob]
    nearest: Memory | None = None  # the smallest memory of those that do not fit

    def run(self, cfg: Config, shape: ModelConfig, engine_ranks: list[int]) -> list[Prediction]:
        """Return the predictions of the layouts that fit, fastest first. Engines have the first of `engine_ranks` with
        which one fits, and those of the fastest layouts the fastest number of them."""
        fitting: list[tuple[Prediction, Config]] = []
        for count in engine_ranks:
            fitting = self._layouts(_engine_of(cfg, count), replace(shape, init="random"))
            if fitting or not self._with_engine():
                break
        fitting.sort(key=lambda pair: pair[0].step_s)
        for number, (best, one) in enumerate(fitting[:WITH_ENGINES]):
            others = (_engine_of(one, count) for count in engine_ranks if count != one.engine.tensor_parallel)
            tried = [pair for other in others if _is_valid(other, self.gpus) for pair in self._fitting(other)]
            fitting[number] = min([(best, one), *tried], key=lambda pair: pair[0].step_s)
        return sorted((prediction for prediction, _ in fitting), key=lambda p: p.step_s)

    def _with_engine(self) -> bool:
        """Return whether the nearest memory is that of a phase with the engine's weights."""
        return self.nearest is not None and self.nearest.phases[self.nearest.peak].get("engine weights", 0) > 0

    def _fitting(self, one: Config) -> list[tuple[Prediction, Config]]:
        """Return the fastest of the sizes that fit, if any does."""
        jobs = []
        for job in _sizes(one, self.job_for):
            memory = plan_memory(job, self.device, Assumptions())
            if memory.fits:
                jobs.append(job)
            elif self.nearest is None or memory.peak_bytes < self.nearest.peak_bytes:
                self.nearest = memory
        turns = [n for n in VIRTUAL if one.parallel.pipeline > 1 and _is_valid(_virtual(one, n), self.gpus)]
        fastest = [_interleaved(job, turns, self.device) for job in jobs]
        return [(best, one) for best in sorted(fastest, key=lambda p: p.step_s)[:1]]

    def _layouts(self, cfg: Config, shape: ModelConfig) -> list[tuple[Prediction, Config]]:
        """Return layouts that fit. Each is tried without recomputation, with as little as fits at the configured sizes,
        and with all; and pipelines with more virtual stages while these make a step faster. `shape`: it is known, and
        nothing is read from folders again."""
        results = []
        keeps = shape.passes_beside or shape.recomputed_modules  # then whole layers are not recomputed
        for parallel in candidates(shape, self.gpus, self.gpus_per_node):

            def recomputing(layers: int | str) -> Config:
                model = replace(shape, recompute=str(layers or "none"))
                return replace(cfg, parallel=parallel, model=model)  # noqa: B023 (a critic has its policy's layout)

            def fits(layers: int) -> bool:
                return plan_memory(self.job_for(recomputing(layers)), self.device, Assumptions()).fits

            if not _is_valid(recomputing(0), self.gpus):
                continue
            results += (least := self._fitting(recomputing("none" if keeps else "full")))
            if least and not keeps:
                most = -(-shape.num_layers // parallel.pipeline)
                fewest = bisect_left(range(most), True, key=fits)
                for recompute in ("none", *[fewest] * (0 < fewest < most)):
                    results += self._fitting(recomputing(recompute))
        return results


def _is_valid(cfg: Config, gpus: int) -> bool:
    try:
        validate_engines(cfg, gpus)
        validate_layout(cfg, gpus)
    except ConfigError:
        return False
    return True


def _engine_of(cfg: Config, ranks: int) -> Config:
    return replace(cfg, engine=replace(cfg.engine, tensor_parallel=ranks))


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
