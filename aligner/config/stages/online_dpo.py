"""Stage online_dpo: preference losses on pairs of the policy's own answers, made anew in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.sections.preference import KEY
from aligner.config.stage import COMPARED, LEARNED, Stage
from aligner.config.stages import dpo
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config


def check(cfg: Config) -> None:
    preference, batch = cfg.algorithm.preference, cfg.batch
    dpo.check(cfg)
    if preference.reference == "stored":
        expected = "model, adapter or none for stage online_dpo, whose answers are not there before training"
        raise ConfigError(f"{KEY}.reference", "stored", expected)
    if preference.row_weights:
        raise ConfigError(f"{KEY}.row_weights", True, "false for stage online_dpo: samples have no such column")
    if batch.group < 2:
        raise ConfigError("batch.group", batch.group, "at least 2 for stage online_dpo: a pair is of two of them")
    for key, value, only in (("minibatch_samples", batch.minibatch_samples, 0), ("epochs", batch.epochs, 1)):
        if value != only:
            expected = f"{only} for stage online_dpo: one optimizer step, on all pairs of a rollout"
            raise ConfigError(f"batch.{key}", value, expected)
    if cfg.reward.normalize:
        expected = "false for stage online_dpo, which compares answers to one prompt"
        raise ConfigError("reward.normalize", True, expected)
    if cfg.debug.rollout_only:
        raise ConfigError("debug.rollout_only", True, "false for stage online_dpo: stage sample writes answers")


STAGE = Stage(
    reads=(
        "sampling",
        "engine",
        "reward",
        "environment",
        "mismatch.replay_routing",
        "algorithm.preference",
        "algorithm.overlong",
        "algorithm.filter_groups",
        "algorithm.filter_rounds",
        "batch.prompts",
        "batch.group",
    ),
    unread=(*LEARNED, *COMPARED),
    rollouts=True,
    pairs=True,
    unit="pairs",
    rows=dpo.rows,
    beside=dpo.beside,
    debug=("first_step_checks",),
    check=check,
)
