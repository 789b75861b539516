"""The section `checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import at_least


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0: only at the end
    keep_last: int = 2  # checkpoints
    keep_best: int = 0  # by `metric`; 0: none
    metric: str = "eval/accuracy"  # for keep_best, larger is better (eval/loss: smaller)
    final: bool = True  # save at the end
    async_save: bool = False  # write while training goes on, from a copy in host memory
    rollouts: bool = True  # store each finished rollout until a checkpoint of its step: never generated twice

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.keep_best", self.keep_best, 0)
