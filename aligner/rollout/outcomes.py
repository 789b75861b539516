"""Rewards and passes of a rollout's samples: for metrics of each source, and for the curriculum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.data.stream import MixedStream, Stream
from aligner.ops.reduce import gathered, reduce_metrics
from aligner.rewards.composite import RewardPipeline, Scores
from aligner.rewards.correct import correct_answers
from aligner.types import Prompt, Sample, ScalarMetrics


@dataclass
class Outcomes:
    """A sample passes if the functions that apply and can give `full_score` give it; reward models do not count."""

    prompts: PromptDataset | PromptMixture
    rewards: RewardPipeline
    full_score: float
    ranks: dist.ProcessGroup | None = None  # data-parallel
    stream: Stream | None = None  # of a curriculum that asks for passes

    def metrics(self, samples: Sequence[Sample], scores: Scores) -> ScalarMetrics:
        """Return data/<name>/{share,reward_mean,pass_rate} of each source, NaN in a rollout without its samples."""
        if not isinstance(self.prompts, PromptMixture):
            return {}
        passed, means = self._passed(scores), {}
        source = [self._origin(sample.prompt)[0] for sample in samples]
        for name in self.prompts.parts:
            valid = [i for i, of in enumerate(source) if of == name and scores.valid[i]]
            count = float(len(valid))
            means[f"data/{name}/share"] = (float(source.count(name)), float(len(samples)))
            means[f"data/{name}/reward_mean"] = (math.fsum(scores.raw[i] for i in valid), count)
            if self.rewards.rewards_of_threads:
                means[f"data/{name}/pass_rate"] = (float(sum(passed[i] for i in valid)), count)
        return reduce_metrics(means, {}, self.ranks)

    def observe(self, samples: Sequence[Sample], scores: Scores) -> None:
        """Give the curriculum the passes of the valid samples, of all data-parallel ranks. Collective over these."""
        if self.stream is None:
            return
        counts: dict[str, dict[int, tuple[int, int]]] = {}
        own = [
            (*self._origin(sample.prompt), passed)
            for sample, passed, valid in zip(samples, self._passed(scores), scores.valid, strict=True)
            if valid
        ]
        for name, identity, passed in (one for of_rank in gathered(own, self.ranks) for one in of_rank):
            rows = counts.setdefault(name, {})
            before = rows.get(identity, (0, 0))
            rows[identity] = before[0] + passed, before[1] + 1
        streams = self.stream.streams if isinstance(self.stream, MixedStream) else {"": self.stream}
        for name, rows in counts.items():
            streams[name].observe(rows)

    def _passed(self, scores: Scores) -> list[bool]:
        """Return whether each sample passed; nothing without functions."""
        functions = {reward.name for reward in self.rewards.rewards_of_threads}
        columns = {name: column for name, column in scores.components.items() if name in functions}
        return correct_answers(columns, self.full_score, self.rewards)

    def _origin(self, prompt: Prompt) -> tuple[str, int]:
        """Return the name of a prompt's source, empty without sources, and its id there."""
        return self.prompts.origin(prompt) if isinstance(self.prompts, PromptMixture) else ("", prompt.id)
