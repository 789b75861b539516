"""The schedules of rollouts that tests/algorithms runs, over (engine.lag, engine.window)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests import stages

STEPS = 5
COMMON = [f"run.steps={STEPS}", "run.export=true", "reward.normalize=true", "batch.epochs=2", "sampling.top_p=0.9"]
COMMON += ["run.eval_every=2"]  # and before the first step, and after the last: four
SAMPLES = ("reward/", "response/", "staleness/", "window/")  # metrics of what was generated
WINDOWED = ("sampling.max_response_tokens=10", "sampling.stop=['1','e']")


@dataclass(frozen=True)
class Mode:
    lag: int = 0
    window: int = 0
    overrides: tuple[str, ...] = ()
    stage: str = "grpo"
    trainers: int = 1

    @property
    def world(self) -> int:
        """The trainer's ranks, and one that only generates where that is ahead."""
        return self.trainers + (self.lag > 0)

    def settings(self, data: Path, run: Path, *overrides: str) -> list[str]:
        own = ["engine.ranks=1", f"engine.lag={self.lag}", f"engine.window={self.window}"] if self.lag else []
        own += [*COMMON, f"data.eval={data / 'eval.jsonl'}", "checkpoint.every=2", *self.overrides]
        return stages.overrides(self.stage, data, run, *own, *overrides)


MODES = {
    "sync": Mode(),
    "filter": Mode(overrides=("algorithm.filter_groups=true", "algorithm.filter_rounds=50")),
    "remax": Mode(overrides=("algorithm.advantage=remax", "sampling.top_k=20")),
    "filter-dp2": Mode(overrides=("algorithm.filter_groups=true", "algorithm.filter_rounds=50"), trainers=2),
    "remax-dp2": Mode(overrides=("algorithm.advantage=remax", "sampling.top_k=20"), trainers=2),
    "ppo": Mode(stage="ppo"),  # with a reward model
    "lag1": Mode(1),
    "lag2": Mode(2),
    "windows": Mode(1, 3, WINDOWED),
    "curriculum": Mode(1, 3, (*WINDOWED, "curriculum={skip_epochs: 1, learnability: true}", "eval.full_score=0.25")),
}


def steps(run: Path) -> list[dict]:
    """The records of training, less the evaluation before it."""
    return stages.records(run)[1:]
