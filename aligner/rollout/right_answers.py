"""Right answers of a group, one for each of its answers to be compared with."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.rewards.correct import correct_answers
from aligner.rollout.groups import Groups
from aligner.rollout.sample_generator import Score
from aligner.rollout.score import Scorer
from aligner.types import Sums


@dataclass
class RightAnswers:
    """An answer is right if the reward functions that apply and can give `full_score` give it."""

    score: Scorer
    full_score: float

    def begin(self, step: int) -> Score | None:
        """Start a step. Return the function that scores answers while others are generated, if one may."""
        self.score.rewards.begin(step)
        return self.score.rewards.score_early

    def __call__(self, groups: Groups) -> tuple[list[str | None], Sums]:
        """Return for each answer the next right one of its group, cyclically and never itself; None without another.
        Also return sums for metrics. Collective over the peers."""
        groups, size = self.score(groups), groups.size
        correct = correct_answers(groups.components, self.full_score, self.score.rewards)
        others: list[str | None] = []
        for i in range(len(groups.samples)):
            first = i - i % size
            after = (first + (i + step) % size for step in range(1, size))
            others.append(next((groups.samples[j].response for j in after if correct[j]), None))
        return others, {"distill/right": (float(sum(correct)), float(len(correct)))}
