"""Scores of groups: reward functions run on one share per peer, models on all samples by all peers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from aligner.errors import RewardError
from aligner.ops.agree import raised_together
from aligner.ops.reduce import gathered
from aligner.rewards.composite import Component, Early, RewardPipeline, Scores
from aligner.rollout.groups import Groups
from aligner.rollout.sharing import share
from aligner.run.timers import Timers
from aligner.types import Sample


@dataclass
class Scorer:
    rewards: RewardPipeline
    peers: dist.ProcessGroup  # ranks with the same samples
    timers: Timers = field(default_factory=Timers)

    def __call__(self, groups: Groups) -> Groups:
        """Return the groups with their scores. Functions score the samples that this peer has generated, except
        those begun. Raises RewardError on every rank. Collective over the peers, and over the world where one fails."""
        peers, samples, size = self.peers, groups.samples, groups.size
        own = share(len(groups.slots), peers.size(), peers.rank())
        with self.timers("score"):
            with raised_together(RewardError):
                components = self._functions(samples[own.start * size : own.stop * size], groups.begun)
            self._stop_at_failures(components)
            if peers.size() > 1:
                pieces = gathered(components, peers)
                components = {name: [v for piece in pieces for v in piece[name]] for name in components}
            with raised_together(RewardError):
                components |= self.rewards.models(samples)
        groups.components, groups.begun = components, {}
        return groups

    def _functions(self, samples: Sequence[Sample], begun: Mapping[int, Early]) -> dict[str, Component]:
        """Score samples. Trajectories whose environment failed get NaN, which makes them invalid."""
        sound = [i for i, s in enumerate(samples) if s.trajectory is None or not s.trajectory.failure]
        if len(sound) == len(samples):
            return self.rewards.functions(samples, begun)
        components = self.rewards.functions([samples[i] for i in sound])
        scores = {name: dict(zip(sound, column, strict=True)) for name, column in components.items()}
        return {name: [known.get(i, math.nan) for i in range(len(samples))] for name, known in scores.items()}

    def _stop_at_failures(self, own: dict[str, Component]) -> None:
        """Raise RewardError where functions could not score too many samples of the rollout. Collective."""
        if not self.rewards.may_fail:
            return
        counts = gathered((*self.rewards.failed(own), max(map(len, own.values()))))
        failed, scored = (sum(each[column] for each in counts) for column in (0, 2))
        limit = self.rewards.config.max_invalid_fraction
        if failed > max(1, limit * scored):
            cause = next(cause for _, cause, _ in counts if cause)
            self.rewards.forget_failures()
            expected = f"expected at most reward.max_invalid_fraction={limit:g} of them"
            raise RewardError(f"{failed} of {scored} samples of a rollout could not be scored: {expected}. {cause}")

    def combined(self, groups: Groups, update: bool) -> Scores:
        """Combine the scores. `update`: update the running statistics of reward.normalize."""
        return self.rewards.combine(groups.components, len(groups.samples), update=update)
