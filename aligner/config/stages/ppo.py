"""Stage ppo: a policy and its critic."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from aligner.config.stage import COMPARED, LEARNED, ROLLOUTS, Stage
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config


def beside(cfg: Config) -> tuple[str, ...]:
    return ("reference", "critic") if cfg.algorithm.kl.coef > 0 else ("critic",)


def check(cfg: Config) -> None:
    if cfg.algorithm.advantage != "gae":
        raise ConfigError("algorithm.advantage", cfg.algorithm.advantage, "gae for stage ppo, which has a critic")
    if cfg.critic.trunk == "policy":
        _trunk(cfg)
    elif not (cfg.critic.init or cfg.reward.model):
        raise ConfigError("critic.init", "", "a folder to start the critic from, or reward.model for stage ppo")
    if cfg.critic.parallel != cfg.parallel:
        expected = "the same as parallel: samples stay on the ranks of the policy's layout"
        raise ConfigError("critic.parallel", asdict(cfg.critic.parallel), expected)


def _trunk(cfg: Config) -> None:
    if not cfg.model.lora.rank:
        expected = "own with model.lora.rank=0, which trains the policy's weights: nothing stays for a critic to share"
        raise ConfigError("critic.trunk", cfg.critic.trunk, expected)
    if cfg.critic.init:
        expected = "empty with critic.trunk=policy: the critic starts from the policy's frozen weights"
        raise ConfigError("critic.init", cfg.critic.init, expected)


STAGE = Stage(
    reads=(*ROLLOUTS, "critic", "environment"),
    unread=(*LEARNED, *COMPARED),
    rollouts=True,
    beside=beside,
    debug=("first_step_checks",),
    check=check,
)
