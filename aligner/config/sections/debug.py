"""The section `debug`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import at_least
from aligner.errors import ConfigError


@dataclass
class DebugConfig:
    skip_refit: bool = False  # test hook: the engine keeps its old weights and the next refit must notice
    shuffle_rewards: bool = False  # control experiment: permute rewards within each group
    record: int = 0  # keep the last n rollouts, or batches of rows, in <run.dir> (rollout_only and 0: all)
    record_answers: bool = False  # write every answer of the engine to <run.dir>/answers
    rollout_only: bool = False  # generate, score, measure, record; no optimizer, no update
    train_only: str = ""  # a recorded rollout, or a folder of them, to train on instead of an engine's
    replay: str = ""  # a run folder: steps that are recorded there have their rollouts from it (`aligner replay`)
    until: int = 0  # end after this step, unsaved and without an evaluation; 0: run.steps (`aligner replay`)
    first_step_checks: bool = False  # before and at the first update: what must hold exactly, or stop

    def __post_init__(self) -> None:
        at_least("debug.record", self.record, 0)
        at_least("debug.until", self.until, 0)
        if self.train_only and (self.rollout_only or self.record):
            key = "rollout_only" if self.rollout_only else "record"
            expected = "off with debug.train_only: a recording is neither generated nor recorded again"
            raise ConfigError(f"debug.{key}", getattr(self, key), expected)
        if self.replay and (self.train_only or self.rollout_only):
            expected = "empty with debug.train_only and debug.rollout_only: it is for a run that trains on an engine's"
            raise ConfigError("debug.replay", self.replay, expected)
        if self.first_step_checks and self.rollout_only:
            raise ConfigError("debug.first_step_checks", True, "false with debug.rollout_only: there is no update")
