"""Rewards and passes of the samples of each source of `data.sources`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from aligner.data.mixture import PromptMixture
from aligner.ops.reduce import reduce_metrics
from aligner.rewards.composite import Component, RewardPipeline, Scores
from aligner.rewards.correct import correct_answers
from aligner.types import Sample, ScalarMetrics


@dataclass
class Outcomes:
    """A sample passes if the functions that apply and can give `full_score` give it; reward models do not count."""

    prompts: PromptMixture
    rewards: RewardPipeline
    full_score: float
    ranks: dist.ProcessGroup | None = None  # data-parallel

    def passed(self, components: dict[str, Component]) -> list[bool]:
        """Return whether each sample passed; nothing without functions."""
        functions = {reward.name for reward in self.rewards.rewards_of_threads}
        scores = {name: column for name, column in components.items() if name in functions}
        return correct_answers(scores, self.full_score, self.rewards)

    def metrics(self, samples: Sequence[Sample], scores: Scores) -> ScalarMetrics:
        """Return data/<name>/{share,reward_mean,pass_rate} of each source, NaN in a rollout without its samples."""
        passed, means = self.passed(scores.components), {}
        source = [self.prompts.source_of(sample.prompt) for sample in samples]
        for number, name in enumerate(self.prompts.parts):
            valid = [i for i, of in enumerate(source) if of == number and scores.valid[i]]
            count = float(len(valid))
            means[f"data/{name}/share"] = (float(source.count(number)), float(len(samples)))
            means[f"data/{name}/reward_mean"] = (math.fsum(scores.raw[i] for i in valid), count)
            if self.rewards.rewards_of_threads:
                means[f"data/{name}/pass_rate"] = (float(sum(passed[i] for i in valid)), count)
        return reduce_metrics(means, {}, self.ranks)
