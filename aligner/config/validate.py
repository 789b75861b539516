"""Checks that need several sections of the config, or the number of ranks: nothing is written before they pass. The
rules are in `rules.py`; here is their order, and the checks of files."""

from __future__ import annotations

from aligner.config.checks import exists
from aligner.config.identity import reads
from aligner.config.own_stage import engine_args, typed_args
from aligner.config.rules import RuleContext
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.config.validate_model import validate_model, validate_on_gpu
from aligner.errors import ConfigError
from aligner.user_code import is_source


def validate(cfg: Config, world_size: int) -> None:
    """Raise ConfigError (LayoutError for sizes that do not divide by the ranks) for the first error."""
    _paths(cfg)
    validate_values(cfg, world_size)


def validate_values(cfg: Config, world_size: int) -> None:
    """Check everything but whether the data and the weights exist: the part of `validate` before they are here."""
    stage, subject = STAGES[cfg.stage.name], RuleContext(cfg, world_size)
    subject.check("without effect", "engines", "factors", "routing", "zero", "ranks")
    validate_model(cfg, cfg.model)
    subject.check("stage")
    if is_source(cfg.stage.name):
        typed_args(cfg)
    engine_args(cfg)
    stage.check(cfg)
    subject.check("ptx")
    if stage.rollouts:
        subject.check(*(["algorithm"] if stage.trains else []), "rewards")
        _judges(cfg)
    subject.check("trajectories", "batch")


def validate_layout(cfg: Config, world_size: int) -> None:
    """Check whether sizes divide, for a job on GPUs: the part of `validate` that needs no files."""
    subject = RuleContext(cfg, world_size)
    subject.check("ranks")
    validate_model(cfg, cfg.model)
    validate_on_gpu(cfg, cfg.model)
    subject.check("batch")


def validate_engines(cfg: Config, world_size: int) -> None:
    """Check the ranks of engines, and whether they may work while the trainer does: a part of `validate`."""
    RuleContext(cfg, world_size).check("engines")


def _paths(cfg: Config) -> None:
    optional = {
        "data.train": cfg.data.train,
        "data.eval": cfg.data.eval,
        "eval.tasks_folder": cfg.eval.tasks_folder,
        "model.lora.init": cfg.model.lora.init,
        "model.init": "" if cfg.model.init == "random" else cfg.model.init,
        "critic.init": cfg.critic.init if reads(cfg.stage.name, "critic.init") else "",
        "reward.model": cfg.reward.model if reads(cfg.stage.name, "reward.model") else "",
        "run.resume": "" if cfg.run.resume in ("auto", "never") else cfg.run.resume,
        "debug.train_only": cfg.debug.train_only,
        "debug.replay": cfg.debug.replay,
        "ptx.data.train": cfg.ptx.data.train,
    }
    for section, data in (("data", cfg.data), ("ptx.data", cfg.ptx.data)):
        optional |= {f"{section}.sources.{source.label}.path": source.path for source in data.sources}
    for name in ("model", "question_file"):
        optional |= {f"reward.judges.{judge.name}.{name}": getattr(judge, name) for judge in cfg.reward.judges}
    for key, path in optional.items():
        if path:
            exists(key, path)


def _judges(cfg: Config) -> None:
    for judge in cfg.reward.judges:
        assert judge.text  # it may be in a file, and invalid
        deadline_s, limit_s = judge.endpoint.deadline_s, cfg.reward.timeout_s
        if judge.endpoint.base_url and deadline_s >= limit_s:
            key = f"reward.judges.{judge.name}.endpoint.deadline_s"
            raise ConfigError(key, deadline_s, f"less than reward.timeout_s={limit_s:g}, which ends the run")
