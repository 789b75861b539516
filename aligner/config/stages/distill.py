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
    return ("teacher",)


def check(cfg: Config) -> None:
    teacher = cfg.algorithm.distill.teacher
    if not teacher:
        raise ConfigError(f"{KEY}.teacher", "", "a folder with the model to learn from, for stage distill")
    exists(f"{KEY}.teacher", teacher)


STAGE = Stage(reads=(*SEQUENCES, KEY), beside=beside, debug=("first_step_checks",), check=check)
