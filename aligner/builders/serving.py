"""A rank that only generates, from a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.builders.data import make_sampling
from aligner.builders.engines import child_engine, engine_dtype, policy_engine
from aligner.builders.job import POLICY, Job
from aligner.config.engines import ENGINES
from aligner.config.on_demand import imported, on_demand
from aligner.config.sections.model.config import ModelConfig, generating
from aligner.refit.exchange import Exchange
from aligner.refit.plan import EngineGrid, TrainerGrid
from aligner.refit.serve import OrderServer
from aligner.refit.transfer import planned
from aligner.run.phases import PhaseMemory

if TYPE_CHECKING:
    from aligner.engines.child.in_place import FilledInPlace
    from aligner.engines.native.fleet import FleetEngine
    from aligner.refit.factors import FactorExchange


def serve(job: Job) -> int:
    """Do what the trainer's ranks order, until they end; returns the exit code."""
    cfg, bridge = job.cfg, job.bridge
    model = generating(job.initial.config, cfg.engine.reads_ahead)
    assert bridge is not None
    bridge.signal = lambda: job.boundary.signals.received
    engine = job.built.engines[POLICY] = _engine(job, model)
    trainer = TrainerGrid.of(model, cfg.parallel, bridge.trainers // cfg.parallel.model_size)

    def plan() -> Exchange | FactorExchange:
        engines = EngineGrid(bridge.engines, bridge.filled_together)
        return planned(trainer, engines, model, (job.dtype, engine_dtype(job)), job.device, cfg.refit, bridge)

    memory = PhaseMemory(cfg.memory, job.device, {}, engine, cfg.engine.cache_bytes)
    memory.rank = bridge.rank
    job.timers.on_phase = job.watchdog.phase
    check_memory = lambda: memory.check(memory.take(alone=True))  # noqa: E731
    trajectories = None
    if cfg.environment.on:
        sampling = make_sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens)
        trajectories = on_demand("environment, to generate")(job, engine, sampling).serve
    well = OrderServer(bridge, engine, plan, cfg.refit, job.timers, memory.phase, check_memory, trajectories)()
    bridge.leave(well)
    return 0 if well else 1


def _engine(job: Job, model: ModelConfig) -> FleetEngine | FilledInPlace:
    if job.cfg.engine.child is not None:
        return child_engine(job, model, imported(ENGINES[job.cfg.engine.name].made_apart_by))
    return policy_engine(job, model)
