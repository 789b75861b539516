"""A stage's run: what its checkpoints hold and must share, its metrics, and what is saved when it fails or ends."""

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
from aligner.builders.opening import opening
from aligner.config.derived import response_limits
from aligner.config.freeze import FILE_NAME, environment_code, freeze, load_frozen, reward_code
from aligner.config.identity import definition, reads
from aligner.config.schema import ROLLOUT_STAGES
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
    """`models` are saved with their optimizers, by these names, and `state` with them."""
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
    if cfg.debug.record and cfg.stage.name not in ROLLOUT_STAGES:
        job.seen.keeps = True
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
    run.memory = PhaseMemory(cfg.memory, job.device, memories, here, cfg.engine.cache_bytes, asked)
    run.timers.around = run.memory.phase
    if job.env.rank == 0:
        for line in opening(job, models):
            job.say(line)
    return run


def _accepted(job: Job) -> None:
    """Note the start in a folder that is this run's by now. Its config.yaml gets what the config alone did not say: the
    true shape of the model, and the steps that run.epochs means."""
    folder = job.cfg.run.dir
    if (Path(folder) / FILE_NAME).is_file():
        kept = load_frozen(folder)
        found = dataclasses.replace(kept, model=job.initial.config, run=copy(kept.run))
        if kept.run.epochs:
            found.run.steps = job.cfg.run.steps
        if found != kept:
            freeze(found, folder)
    job.start.accepted()


def _facts(job: Job, checkpoints: Checkpoints) -> dict[str, Any]:
    """What the numbers of this run are made of; rank 0's."""
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
    """What a checkpoint of adapters goes with: the weights that they were trained beside, and how both are joined."""
    lora = job.cfg.model.lora
    if not job.built.frozen:
        return None
    joined = {"rank": lora.rank, "scale": lora.scale, "dora": lora.dora, "targets": target_names(job.initial.config)}
    if lora.quantize_base != "none":
        joined["quantize_base"] = lora.quantize_base
    return joined | {"frozen weights": job.built.frozen}


def _definition(job: Job) -> dict[str, Any]:
    """What this run is made of, the same on every rank. Raises ViewError."""
    cfg, tokenizer, code = job.cfg, job.tokenizer, reward_code(job.cfg)
    contents = {"model.init": job.initial.content}
    contents["model.tokenizer"] = digest((tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.pad_token_id))
    if code:
        contents["reward.functions"] = hashlib.sha256(code).hexdigest()[:16]
    if code := environment_code(cfg):
        contents["environment"] = hashlib.sha256(code).hexdigest()[:16]
    found = definition(cfg, contents | job.built.contents)
    mine = {key: json.dumps(value) for key, value in (found | _identity(job)).items()}
    same_view(cfg.run.dir, lambda: mine)
    return found


@contextmanager
def saved_first(run: Run) -> Iterator[None]:
    """A reward or an engine that fails in the middle of a run, or the gate, costs nothing: the last whole step is saved
    before the run ends."""
    try:
        yield
    except SHARED as error:
        run.save_after(error)
        raise


def together(*measures: Evaluate | None) -> Evaluate | None:
    """One evaluation of several, of which some may not be wanted."""
    wanted = [measure for measure in measures if measure is not None]
    return (lambda: {name: value for measure in wanted for name, value in measure().items()}) if wanted else None


def refuse_checkpoints(job: Job) -> None:
    """A folder that has some belongs to a run that trains. Raises ConfigError."""
    run_dir = Path(job.cfg.run.dir)
    if complete_checkpoints(run_dir / "checkpoints"):
        hint = f"To generate from one: model.init={run_dir}, and a new run.dir."
        raise ConfigError("run.dir", str(run_dir), "a folder without checkpoints with debug.rollout_only", hint)


def finish(job: Job, run: Run, model: ShardedModel, extra: dict[str, Any] | None = None) -> None:
    """After the last step: the export. `extra` belongs to the weights, beside them and in the last checkpoint."""
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
