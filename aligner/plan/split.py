"""Number of a job's GPUs that should only generate, where they do so while the others train (`engine.lag`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.config.validate import validate_engines, validate_layout
from aligner.errors import ConfigError
from aligner.plan.devices import Assumptions, Device
from aligner.plan.job import PlanJob
from aligner.plan.memory import plan_memory
from aligner.plan.prediction import Prediction, predict


def splits(
    cfg: Config, shape: ModelConfig, gpus: int, device: Device, job_for: Callable[[Config], PlanJob]
) -> list[Prediction]:
    """Return a prediction of each `engine.ranks` that divides and fits with the trainer's layout, the fastest first; of
    equally fast ones the one with the fewest."""
    predictions = []
    width = cfg.engine.tensor_parallel
    for ranks in range(width, gpus, width):
        one = replace(cfg, engine=replace(cfg.engine, ranks=ranks), model=replace(shape, init="random"))
        try:
            validate_engines(one, gpus)
            validate_layout(one, gpus)
            job = job_for(one)
        except ConfigError:
            continue
        if plan_memory(job, device, Assumptions()).fits:
            predictions.append(predict(job, device))
    return sorted(predictions, key=lambda p: p.overlapped[0])
