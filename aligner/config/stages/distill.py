"""Stage distill: a student learns a teacher's distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.checks import exists
from aligner.config.sections.distill import KEY
from aligner.config.stage import SEQUENCES, Stage
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config


def beside(cfg: Config) -> tuple[str, ...]:
    return () if cfg.algorithm.distill.store else ("teacher",)


def check(cfg: Config) -> None:
    teacher, store = cfg.algorithm.distill.teacher, cfg.algorithm.distill.store
    if not teacher and not store:
        raise ConfigError(f"{KEY}.teacher", "", "a folder with the model to learn from, for stage distill")
    if cfg.algorithm.distill.on_policy and cfg.sampling.temperature <= 0:
        expected = f"a number > 0 with {KEY}.on_policy: answers to learn from are sampled"
        raise ConfigError("sampling.temperature", cfg.sampling.temperature, expected)
    if teacher:
        exists(f"{KEY}.teacher", teacher)
    if store and not teacher:
        exists(f"{KEY}.store", store)


def generates(cfg: Config) -> bool:
    return cfg.algorithm.distill.on_policy > 0


STAGE = Stage(
    reads=(*SEQUENCES, KEY, "sampling", "engine"),
    generates=generates,
    beside=beside,
    debug=("first_step_checks",),
    check=check,
)
