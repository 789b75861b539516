"""The section `checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key


@dataclass
class CheckpointConfig(Section, key="checkpoint"):
    every: int = key(0, "Steps between checkpoints. 0: only at the end.", least=0)
    keep_last: int = key(2, "Number of latest checkpoints to keep.", least=1)
    keep_best: int = key(0, "Number of best checkpoints, by `metric`, to keep in addition.", least=0)
    metric: str = key("eval/accuracy", "Metric for `keep_best`. Larger is better, except for eval/loss.")
    final: bool = key(True, "Save a checkpoint at the end.")
    async_save: bool = key(False, "Write checkpoints while training continues, from a copy in host memory.")
    rollouts: bool = key(
        True, "Store each finished rollout until a checkpoint has its step, so that a resumed run does not repeat it."
    )

    @property
    def best_by_evaluation(self) -> bool:
        return self.keep_best > 0 and self.metric.startswith("eval/")
