"""Stage sample: answers to prompts with their rewards, as files that sft, dpo and kto train on. No weight changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aligner.config.checks import at_least, one_of
from aligner.config.stage import COMPARED, LEARNED, Stage
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config

KEY = "stage.sample"
TAKEN = ("prompt", "row", "sample", "reward", "finished", "scores", "reference")  # columns of all.jsonl


@dataclass
class SampleConfig:
    """Of `batch.group` answers to each prompt, which ones become rows of which file (docs/sample.md)."""

    best: int = 1  # best.jsonl: so many different answers of a prompt, by reward; 0: all
    # best.jsonl: only answers with a larger reward. A finite one also makes labels.jsonl, where those are the good ones
    reward_above: float = -math.inf
    pairs: str = "rewards"  # pairs.jsonl: best against worst by rewards, or the row's own answer against samples (SPIN)
    margin_above: float = 0.0  # pairs.jsonl: only rewards that differ by more; equal ones never make a pair
    unfinished: bool = False  # use answers that sampling.max_response_tokens has cut, too
    column: str = "completion"  # of all.jsonl and best.jsonl, with the answer
    round: int = 0  # part of the seeds: another one draws other samples (launchers/iterate.sh counts from 1)

    def __post_init__(self) -> None:
        at_least(f"{KEY}.best", self.best, 0)
        one_of(f"{KEY}.pairs", self.pairs, ("rewards", "answers"))
        at_least(f"{KEY}.margin_above", self.margin_above, 0)
        at_least(f"{KEY}.round", self.round, 0)
        if not self.column or self.column in TAKEN:
            raise ConfigError(f"{KEY}.column", self.column, f"a name other than {', '.join(TAKEN)}")

    @property
    def labels(self) -> bool:
        return math.isfinite(self.reward_above)


def check(cfg: Config) -> None:
    if cfg.data.sources:
        found = [source.path for source in cfg.data.sources]
        raise ConfigError(
            "data.sources", found, "none for stage sample: one file in data.train, its rows in their order"
        )
    if cfg.reward.normalize:
        expected = "false for stage sample: an answer's reward would depend on those before it"
        raise ConfigError("reward.normalize", True, expected)
    for key in ("rollout_only", "train_only", "record"):
        value = getattr(cfg.debug, key)
        if value:
            raise ConfigError(f"debug.{key}", value, "off for stage sample")
    if cfg.checkpoint.every < 1:
        expected = "at least 1 for stage sample: finished batches are kept with it"
        raise ConfigError("checkpoint.every", cfg.checkpoint.every, expected)
    own = cfg.stage.sample
    if not (cfg.reward.functions or cfg.reward.model or cfg.reward.judges):
        hint = "Without rewards: all samples, and pairs with stage.sample.pairs=answers."
        for key, value, default in (("reward_above", own.reward_above, -math.inf), ("best", own.best, 1)):
            if value != default:
                raise ConfigError(
                    f"{KEY}.{key}", value, f"{default} without reward.functions, reward.model and reward.judges", hint
                )


STAGE = Stage(
    reads=("sampling", "engine", "reward", "algorithm.overlong", "batch.prompts", "batch.group"),
    unread=(*LEARNED, *COMPARED, "data.shuffle", "data.weight_by"),
    rollouts=True,
    trains=False,
    answers=False,
    check=check,
    section=SampleConfig,
)
