"""Recorded rollouts, from a job: those that it learns from, and those that it writes."""

from __future__ import annotations

from pathlib import Path

from aligner.builders.job import Job, digest, tokenizer_hash
from aligner.config.derived import recorded_steps
from aligner.megatron.train import ShardedModel
from aligner.models.fingerprint import file_fingerprint
from aligner.ops.agree import same_view
from aligner.roles.model_init import shape_of
from aligner.rollout.record import FOLDER, Origin, Recorder
from aligner.rollout.replay import RecordedSource, ReplayedRollouts, check_recording
from aligner.rollout.source import Rollouts
from aligner.run.rows import file_name


def make_recorded(job: Job, model: ShardedModel) -> RecordedSource:
    """Make the source of recorded rollouts, instead of an engine's. Raises ConfigError, DataError."""
    cfg = job.cfg
    where = cfg.debug.train_only, cfg.run.steps, _origin(job), job.layout
    routed = model.cfg if cfg.mismatch.replay_routing else None
    source = RecordedSource.open(*where, lambda: model.step_count, job.say, routed)
    seen = same_view(cfg.debug.train_only, lambda: {p.name: file_fingerprint(p) for p in source.files.values()})
    source.timers = job.timers
    job.built.contents["debug.train_only"] = seen[source.files[1].name]
    return source


def make_replayed(job: Job, source: Rollouts, model: ShardedModel) -> ReplayedRollouts:
    """Make the source of recorded rollouts without a gap after them: after one the source must generate all. Raises
    DataError."""
    folder, files = Path(job.cfg.debug.replay) / FOLDER, {}
    routed = model.cfg if job.cfg.mismatch.replay_routing else None
    for step in range(job.cfg.debug.until or job.cfg.run.steps, 0, -1):
        path = folder / file_name(step)
        if not path.is_file():
            break
        check_recording(path, _origin(job), routed)
        files[step] = path
    recorded = RecordedSource(files, job.layout, job.cfg.batch.prompts, lambda: model.step_count, routed, job.timers)
    return ReplayedRollouts(source, recorded)


def make_recorder(job: Job, source: Rollouts) -> Recorder:
    folder, count = Path(job.cfg.run.dir) / FOLDER, recorded_steps(job.cfg)
    recorder = Recorder(source, folder, count, _origin(job), job.layout, job.tokenizer.pad_token_id)
    job.built.on_step.append(recorder.keep)
    return recorder


def _origin(job: Job) -> Origin:
    cfg, shape = job.cfg, job.initial.config
    return Origin(
        tokenizer_hash(job),
        shape.vocab_size,
        cfg.batch.prompts,
        cfg.batch.group,
        cfg.sampling.temperature,
        digest(sorted(shape_of(shape).items())),
        cfg.stage.name,
    )
