"""The source of rollouts, one step after the other.

    weights -> prompts -> requests -> generations -> scores -> groups kept -> batch

Each step is an object with one type in and one out. Samples stay with their data-parallel rank throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.errors import EnvironmentFailedError
from aligner.ops.reduce import reduce_metrics
from aligner.ops.rl.shaping import shaped_rewards
from aligner.refit.transfer import Refit
from aligner.refit.verify import Verifier
from aligner.rewards.composite import Scores
from aligner.rollout.collate import collate
from aligner.rollout.groups import GroupFilter, Groups, by_slot, join_groups
from aligner.rollout.requests import Request, Requests
from aligner.rollout.sample_generator import SampleGenerator, Score
from aligner.rollout.schedule import Schedule
from aligner.rollout.score import Scorer
from aligner.rollout.statistics import staleness_metrics, trajectory_sums
from aligner.run.chain import StepHashes
from aligner.run.timers import Timers
from aligner.types import STOP, RolloutBatch, Sample, ScalarMetrics, Stop

if TYPE_CHECKING:
    from aligner.rollout.outcomes import Outcomes


class Rollout(NamedTuple):
    """This rank's share of a rollout, its metrics so far, and the scores with components."""

    batch: RolloutBatch
    metrics: ScalarMetrics
    scores: Scores


class Rollouts(Protocol):
    """A source of a stage's rollouts."""

    def next(self, step: int) -> Rollout:
        """Return the scored rollout of this step with its metrics and scores."""
        ...


@dataclass
class HashedRollouts:
    """A source whose rollouts go into the chain of hashes."""

    source: Rollouts
    seen: StepHashes

    def next(self, step: int) -> Rollout:
        """Return the source's rollout."""
        rollout = self.source.next(step)
        self.seen.rollout(rollout.batch)
        return rollout


@dataclass
class Weights:
    """The trainer's weights in the engine, and their verification."""

    refit: Refit
    verifier: Verifier
    timers: Timers = field(default_factory=Timers)

    def __call__(self) -> ScalarMetrics:
        with self.timers("refit"):
            metrics = self.refit()
            with self.timers("verify"):
                return metrics | self.verifier.check()

    @property
    def version(self) -> int:
        return self.refit.model.step_count


@dataclass
class RolloutSource:
    """A source of rollouts from the engine."""

    weights: Weights
    requests: Requests
    schedule: Schedule
    score: Scorer
    algorithm: AlgorithmConfig
    ranks: dist.ProcessGroup | None = None  # data-parallel
    outcomes: Outcomes | None = None  # None: nobody asks for them

    @property
    def generator(self) -> SampleGenerator:
        return self.schedule.generator

    def next(self, step: int) -> Rollout:
        rewards = self.score.rewards
        rewards.begin(step)
        self.schedule.collect(step)
        metrics, early = self.weights(), rewards.score_early
        if self.algorithm.filter_groups:
            groups, measured = self._filtered(step, early)
            metrics |= measured
        else:
            groups = self.score(self.schedule(step, early))
        batch, scores = self._batch(groups)
        if self.outcomes and not self.algorithm.filter_groups:
            self.outcomes.observe(groups.samples, scores)
        if batch.forks is not None:
            metrics |= reduce_metrics(*trajectory_sums(batch.samples), self.ranks)
            self._check_failures(step, batch.samples, metrics)
        if sums := self.generator.take_sums():
            metrics |= reduce_metrics(sums, {}, dist.group.WORLD)
        metrics |= staleness_metrics(batch, self.weights.version, self.ranks) | self.requests.stream.metrics()
        metrics |= self.schedule.metrics
        if self.outcomes:
            metrics |= self.outcomes.metrics(groups.samples, scores)
        if late := rewards.take_late():
            metrics |= reduce_metrics(late, {}, dist.group.WORLD)
        return Rollout(batch, metrics, scores)

    def _check_failures(self, step: int, samples: list[Sample], metrics: ScalarMetrics) -> None:
        """Raise EnvironmentFailedError on every rank if all trajectories failed."""
        if metrics["environment/failed"] == 1.0:
            first = samples[0].trajectory
            assert first is not None
            self.score.rewards.forget_failures(self.schedule.drop_in_flight(step))
            tries = f", asked {first.retried + 1} times (environment.retries)," if first.stop == Stop.FAILED else ""
            raise EnvironmentFailedError(
                f"environment: all trajectories of a rollout failed; the first one{tries} {first.failure}"
            )

    def _filtered(self, step: int, early: Score | None) -> tuple[Groups, ScalarMetrics]:
        """Generate rounds until every slot has a group with different rewards; see `rollout/groups.py`."""
        requests, kept, each = self.requests, [], self.algorithm.advantage == "gdpo"
        requests.begin(step)
        group_filter = GroupFilter(requests.slots, requests.group, self.algorithm.filter_rounds, self.ranks, each)
        while group_filter.open:
            groups = self.score(self.schedule.generate_now(requests.take(group_filter.wanted()), score=early))
            # the running statistics of reward.normalize see kept groups only, once
            scores = self.score.combined(groups, update=False)
            if self.outcomes:
                self.outcomes.observe(groups.samples, scores)
            kept.append(group_filter.keep(groups, scores))
        kept = [groups for groups in kept if groups.slots] or kept[:1]  # a round may have none of this rank's
        return by_slot(join_groups(kept)), group_filter.metrics()

    def _batch(self, groups: Groups) -> tuple[RolloutBatch, Scores]:
        slots = torch.tensor(groups.slots).repeat_interleave(groups.size)
        batch = collate(groups.samples, groups.generations, slots, self.generator.tokenizer.pad_token_id)
        scores = self.score.combined(groups, update=True)
        batch.rewards, batch.valid = torch.tensor(scores.total, dtype=torch.float32), torch.tensor(scores.valid)
        if self.algorithm.advantage == "remax":
            batch.greedy_rewards = self._greedy_rewards(groups).repeat_interleave(groups.size)
        return batch, scores

    def _greedy_rewards(self, groups: Groups) -> Tensor:
        """Return float32 [N]: the shaped reward of each prompt's greedy response, NaN where it has no score (ReMax)."""
        greedy = replace(self.generator.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        # a seed of its own is its key in the log of answers
        requests = [Request(slot, prompt, [slot]) for slot, prompt in zip(groups.slots, groups.prompts, strict=True)]
        greedy_groups = self.score(self.schedule.generate_now(requests, greedy))
        rewards = torch.tensor(self.score.combined(greedy_groups, update=False).total, dtype=torch.float32)
        ends, limit = greedy_groups.generations, self.generator.sampling.max_response_tokens
        return shaped_rewards(rewards, ends.lengths, ends.finish_reason == STOP, self.algorithm, limit)
