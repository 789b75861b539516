"""A stage's run: the content and identity of its checkpoints, its metrics, and what is saved when it fails or ends."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from aligner.builders.job import POLICY, Job, digest, tokenizer_hash
from aligner.builders.start_report import start_report
from aligner.config.derived import response_limits
from aligner.config.engines import empties
from aligner.config.freeze import FILE_NAME, environment_code, freeze, load_frozen, outside_code, reward_code
from aligner.config.identity import definition, reads
from aligner.errors import ConfigError
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.megatron.offload import FrozenMemory, ModelMemory
from aligner.megatron.train import ShardedModel
from aligner.models.adapters import target_names
from aligner.ops.agree import same_view
from aligner.refit.export import EXTRA_FILE, export_hf
from aligner.roles.model_init import shape_of
from aligner.run.alarms import Alarms
from aligner.run.chain import Chain, code
from aligner.run.checkpoints import Checkpoints, Stateful
from aligner.run.loop import SHARED, Evaluate, Run
from aligner.run.metrics import MetricsLogger
from aligner.run.phases import PhaseMemory
from aligner.run.rows import FOLDER as ROWS
from aligner.run.rows import RowRecorder
from aligner.run.starts import versions


def make_run(
    job: Job, models: Mapping[str, ShardedModel], state: Mapping[str, Stateful], evaluate: Evaluate | None = None
) -> Run:
    """Make the run. `models` are saved with their optimizers, by these names, and `state` with them."""
    cfg, run_dir = job.cfg, Path(job.cfg.run.dir)
    alarms = Alarms(response_limits(cfg), cfg.critic.warmup_steps)
    checkpoints = Checkpoints(
        run_dir,
        cfg.checkpoint,
        models,
        {**job.built.state, **state, "alarms": alarms},
        _identity(job),
        _definition(job),
        cfg.run.accept_changes,
    )
    checkpoints.now = job.watchdog.clock.now
    checkpoints.on_save += job.built.on_save
    checkpoints.on_commit += job.built.on_commit
    shown = dataclasses.replace(cfg, model=job.initial.config)
    logger = MetricsLogger(run_dir, cfg.logging, dataclasses.asdict(shown), job.env.rank)
    run = Run(cfg, job.env.rank, checkpoints, logger, alarms, job.boundary, evaluate)
    run.accepted = partial(_accepted, job)
    run.chain, run.facts = Chain(run_dir, job.env.rank, models, job.seen, job.device), _facts(job, checkpoints)
    if cfg.debug.record and not cfg.stage.its.rollouts:
        job.seen.keeps_batch = True
        run.on_step.append(RowRecorder(job.seen, run_dir / ROWS, cfg.debug.record, job.layout).keep)
    run.on_step += job.built.on_step
    run.timers = job.timers
    run.timers.on_phase = job.watchdog.phase
    memories: dict[str, FrozenMemory] = {r: ModelMemory(model, cfg.memory.pin) for r, model in job.built.models.items()}
    judges = {role: engine for role, engine in job.built.engines.items() if role != POLICY}
    for role, judge in judges.items():
        memories[role] = FrozenMemory(job.device, judge.model.views.values, cfg.memory.pin)
    here = None if job.bridge is not None else job.built.engines.get(POLICY)
    asked = any(judge.own for judge in cfg.reward.judges)
    empty = here is not None and empties(cfg)
    run.memory = PhaseMemory(cfg.memory, job.device, memories, here, cfg.engine.cache_bytes, asked, empty)
    run.timers.around = run.memory.phase
    if job.env.rank == 0:
        for line in start_report(job, models):
            job.say(line)
    return run


def _accepted(job: Job) -> None:
    """Note the start in a folder that is this run's now. Its config.yaml gets what the config did not contain: the
    true shape of the model, and the steps of run.epochs."""
    folder = job.cfg.run.dir
    if (Path(folder) / FILE_NAME).is_file():
        kept = load_frozen(folder)
        settled = dataclasses.replace(kept, model=job.initial.config, run=copy(kept.run))
        if kept.run.epochs:
            settled.run.steps = job.cfg.run.steps
        if settled != kept:
            freeze(settled, folder)
    job.start.accepted()


def _facts(job: Job, checkpoints: Checkpoints) -> dict[str, Any]:
    """Return the facts on which the numbers of this run depend; on rank 0."""
    if job.env.rank:
        return {}
    ranks = {"ranks": job.env.world_size, "device": job.device.type, "dtype": str(job.dtype).removeprefix("torch.")}
    made = {"identity": checkpoints.identity, "config": checkpoints.definition}
    return made | {"code": code(), "versions": versions(), **ranks}


def _identity(job: Job) -> dict[str, Any]:
    stage, algorithm = job.cfg.stage.name, job.cfg.algorithm
    return {
        "stage": stage,
        "model": shape_of(job.initial.config),
        "tokenizer": tokenizer_hash(job),
        "lora": _adapters(job),
        "algorithm": {
            "advantage": algorithm.advantage if reads(stage, "algorithm.advantage") else "",
            "reward_loss": algorithm.reward_loss.kind if reads(stage, "algorithm.reward_loss.kind") else "",
        },
    }


def _adapters(job: Job) -> dict[str, Any] | None:
    """Return what a checkpoint of adapters belongs to: the weights that they were trained with, and how both are
    merged."""
    lora = job.cfg.model.lora
    if not job.built.frozen:
        return None
    joined = {"rank": lora.rank, "scale": lora.scale, "dora": lora.dora, "targets": target_names(job.initial.config)}
    if lora.quantize_base != "none":
        joined["quantize_base"] = lora.quantize_base
    return joined | {"frozen weights": job.built.frozen}


def _definition(job: Job) -> dict[str, Any]:
    """Return the definition of this run, the same on every rank. Raises ViewError."""
    cfg, tokenizer, code = job.cfg, job.tokenizer, reward_code(job.cfg)
    contents = {"model.init": job.initial.content}
    contents["model.tokenizer"] = digest((tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.pad_token_id))
    if code:
        contents["reward.functions"] = hashlib.sha256(code).hexdigest()[:16]
    if code := environment_code(cfg):
        contents["environment"] = hashlib.sha256(code).hexdigest()[:16]
    for key, code in outside_code(cfg).items():
        contents[key] = hashlib.sha256(code).hexdigest()[:16]
    defined = definition(cfg, contents | job.built.contents)
    view = {key: json.dumps(value) for key, value in (defined | _identity(job)).items()}
    same_view(cfg.run.dir, lambda: view)
    return defined


@contextmanager
def saved_first(run: Run) -> Iterator[None]:
    """Save the last complete step before the run ends with an error of a reward, an engine or the refit's
    verification within the block."""
    try:
        yield
    except SHARED as error:
        run.save_after(error)
        raise


def together(*measures: Evaluate | None) -> Evaluate | None:
    """Combine several evaluations, some of which may be None."""
    wanted = [measure for measure in measures if measure is not None]
    return (lambda: {name: value for measure in wanted for name, value in measure().items()}) if wanted else None


def refuse_checkpoints(job: Job) -> None:
    """Refuse a folder with checkpoints, which belongs to a run that trains. Raises ConfigError."""
    run_dir = Path(job.cfg.run.dir)
    if complete_checkpoints(run_dir / "checkpoints"):
        hint = f"To generate from one: model.init={run_dir}, and a new run.dir."
        raise ConfigError("run.dir", str(run_dir), "a folder without checkpoints with debug.rollout_only", hint)


def finish(job: Job, run: Run, model: ShardedModel, extra: dict[str, Any] | None = None) -> None:
    """Export after the last step. `extra` belongs to the weights, stored with them and in the last checkpoint."""
    if extra is not None:
        run.checkpoints.describe(run.step, EXTRA_FILE, extra)
    if job.cfg.run.export:
        with run.timers("export"):
            folder = export_hf(model, Path(job.cfg.run.dir) / "hf", job.tokenizer, extra, job.initial.origin)
        job.say(f"exported {folder}")
        if model.ema is not None:
            with run.timers("export_ema"), model.ema.in_place():
                folder = export_hf(model, Path(job.cfg.run.dir) / "hf_ema", job.tokenizer, extra, job.initial.origin)
            job.say(f"exported {folder}, the average of decay {model.ema.decay:g}")
    run.logger.close()
