"""Stage grpo: advantages from other samples of the same prompt, no critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.sections.algorithm import GROUP_BASELINES, OTHER_BASELINES
from aligner.config.stage import COMPARED, LEARNED, ROLLOUTS, Stage
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config


def beside(cfg: Config) -> tuple[str, ...]:
    return ("reference",) if cfg.algorithm.kl.coef > 0 else ()


def check(cfg: Config) -> None:
    if cfg.algorithm.advantage == "gae":
        known = ", ".join((*GROUP_BASELINES, *OTHER_BASELINES))
        raise ConfigError("algorithm.advantage", "gae", f"{known}; gae is for stage ppo")


STAGE = Stage(
    reads=(*ROLLOUTS, "environment"),
    unread=(*LEARNED, *COMPARED),
    rollouts=True,
    beside=beside,
    debug=("shuffle_rewards", "first_step_checks"),
    check=check,
)
