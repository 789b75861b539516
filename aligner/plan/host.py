"""Bytes of host memory for each GPU: while a checkpoint is written, when most of them are used (the step's rollout is
still there), and on ranks that only generate."""

from __future__ import annotations

from aligner.families.table import parameters
from aligner.plan.adapters import trained_parameters
from aligner.plan.job import PlanJob, PlannedModel
from aligner.plan.shapes import Count, Grid
from aligner.plan.sizes import (
    filled_together,
    judge_bytes,
    model_bytes,
    moment_bytes,
    optimizer_bytes,
    weight_bytes,
)


def checkpoint_bytes(
    count: Count, grid: Grid, element: int, distributed: bool, averaged: bool = False, moments: float = 8
) -> float:
    """Return the bytes of one rank's share, which lies in host memory until it is written, with either value of
    `checkpoint.async_save`. With the distributed optimizer: weights and state of the numbers it updates. Else
    everything, on the first data-parallel rank."""
    optimizer = optimizer_bytes(count, grid, element, distributed, averaged, moments)
    if not distributed:
        return weight_bytes(count, element) + optimizer
    experts = Count(experts=count.experts, magnitudes=count.magnitudes)
    rest = Count(count.dense, score=count.score)
    return (
        weight_bytes(rest, element) / grid.replicas + weight_bytes(experts, element) / grid.expert_replicas + optimizer
    )


def host_items(job: PlanJob) -> dict[str, float]:
    """Return item -> bytes of the pipeline stage that needs most. Pinned memory of offloaded tensors (`memory.offload`)
    is kept while they are on the device."""
    stages = []
    for stage in range(job.grid.pipeline):
        items = {"checkpoint": 0.0, "offloaded": judge_bytes(job) if "weights" in job.offload else 0.0}
        if job.routing:
            items["routing"] = job.routing * job.rows.longest * _routed_rows(job)
        for model in job.models:
            for name, size in _model_items(job, model, stage).items():
                items[name] += size
        stages.append(items)
    return max(stages, key=lambda items: sum(items.values()))


def _routed_rows(job: PlanJob) -> float:
    """Return the rows whose routing a rank keeps: its share of a rollout, and those in flight, which with windows are
    on all ranks."""
    own = job.rows.count / job.grid.data
    if job.engine is None:
        return own
    window = bool(job.engine.window)
    return own + (job.engine.lag + window) * (job.rows.count if window else own)


def engine_host_bytes(job: PlanJob) -> float:
    """Return the bytes of a rank that only generates. An engine in a process of its own reads the whole model from host
    memory in a refit, one for all ranks of a replica on a node."""
    engine = job.engine
    if engine is None or not (engine.ranks and engine.reserved):
        return 0.0
    return engine.element * parameters(job.served.shape) / filled_together(job)


def _model_items(job: PlanJob, model: PlannedModel, stage: int) -> dict[str, float]:
    away = model_bytes(job, model, stage) if "weights" in job.offload else 0.0
    if not model.trained:
        return {"offloaded": away}
    count, moments = trained_parameters(model, job.grid, stage), moment_bytes(model, job.grid, stage)
    how = count, job.grid, job.element, model.distributed, model.averaged, moments
    if "optimizer" in job.offload:
        away += optimizer_bytes(*how)
    return {"checkpoint": checkpoint_bytes(*how), "offloaded": away}
