"""Whole groups of a rollout batch, and the slots that still need one when groups are filtered.

Dynamic sampling (DAPO, arXiv:2503.14476) replaces prompts whose samples all have the same reward. A rollout has
`prompts` slots, a contiguous share of them on every data-parallel rank, and the samples of a slot never leave its
rank. In each round every open slot, in ascending order, gets the next prompt of the stream, repeatedly while the
round has at most `prompts` of them. A slot keeps the first group that is not all equal. Ranks exchange only the
numbers of filled slots. So a slot's prompt depends on the stream and on rewards alone, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import RewardError
from aligner.ops.reduce import sum_over
from aligner.ops.rl.advantages import learnable
from aligner.rewards.composite import Component, Early, Scores
from aligner.rollout.collate import join_generations
from aligner.rollout.statistics import by_function
from aligner.types import Generations, Prompt, Sample, ScalarMetrics


@dataclass
class Groups:
    """Whole groups of one data-parallel rank: N of them, N x `size` samples, prompt-major."""

    slots: list[int]
    generations: Generations
    samples: list[Sample]
    components: dict[str, Component] = field(default_factory=dict)  # scores of the samples
    begun: dict[int, Early] = field(default_factory=dict)  # scores under way, by index among this peer's samples

    @property
    def size(self) -> int:
        return len(self.samples) // len(self.slots) if self.slots else 0

    @property
    def prompts(self) -> list[Prompt]:
        return [sample.prompt for sample in self.samples[:: self.size or 1]]

    def take(self, indices: Sequence[int]) -> Groups:
        rows = [index * self.size + i for index in indices for i in range(self.size)]
        return Groups(
            [self.slots[i] for i in indices],
            self.generations.select(torch.tensor(rows, dtype=torch.int64)),
            [self.samples[row] for row in rows],
            {name: [column[row] for row in rows] for name, column in self.components.items()},
        )


def join_groups(parts: Sequence[Groups]) -> Groups:
    return Groups(
        [slot for groups in parts for slot in groups.slots],
        join_generations([groups.generations for groups in parts]),
        [sample for groups in parts for sample in groups.samples],
        {name: [v for groups in parts for v in groups.components[name]] for name in parts[0].components},
    )


def by_slot(groups: Groups) -> Groups:
    return groups.take(sorted(range(len(groups.slots)), key=groups.slots.__getitem__))


@dataclass
class GroupFilter:
    """The open slots, the same on every rank; counts of generated and dropped prompts so far."""

    prompts: int
    group: int
    rounds_allowed: int
    ranks: dist.ProcessGroup | None = None  # data-parallel
    each_function: bool = False  # a group is all equal only if the scores of every reward function are (gdpo)
    rounds: int = 0
    generated: int = 0
    accepted: int = 0  # groups that are not all equal; some find their slot filled
    reward: tuple[float, float] = (0.0, 0.0)  # sum and number of the raw rewards of all samples

    def __post_init__(self) -> None:
        self.open = list(range(self.prompts))

    def wanted(self) -> list[int]:
        """Return the slots to generate for in the next round, in the order in which they take prompts from the stream.

        Raises RewardError after the last allowed round.
        """
        if self.rounds == self.rounds_allowed:
            dropped = self.generated - self.accepted
            raise RewardError(
                f"algorithm.filter_groups: after algorithm.filter_rounds={self.rounds_allowed} rounds, "
                f"{len(self.open)} of {self.prompts} prompts have no group yet whose rewards differ: {dropped} of "
                f"{self.generated} generated groups were all equal or invalid. Expected prompts that the policy solves "
                "sometimes: use other prompts, a larger batch.group, more rounds, or algorithm.filter_groups=false"
            )
        self.rounds += 1
        return self.open * max(1, self.prompts // len(self.open))

    def keep(self, groups: Groups, scores: Scores) -> Groups:
        """Return the groups of this round that fill a slot of this rank. Collective over `ranks`."""
        rewards = by_function(scores) if self.each_function else torch.tensor(scores.total, dtype=torch.float64)
        valid = torch.tensor(scores.valid, dtype=torch.bool)
        number = torch.arange(len(groups.slots)).repeat_interleave(self.group)
        good = learnable(rewards, number, valid).view(len(groups.slots), self.group).any(1).tolist()
        first: dict[int, int] = {}
        for index, slot in enumerate(groups.slots):
            if good[index]:
                first.setdefault(slot, index)
        self._add_round(
            list(first), len(groups.slots), sum(good), [v for v, ok in zip(scores.raw, scores.valid, strict=True) if ok]
        )
        return groups.take(list(first.values()))

    def _add_round(self, filled: list[int], generated: int, accepted: int, raw: list[float]) -> None:
        """Add this rank's round to the state of all ranks."""
        counts: Tensor = torch.zeros(self.prompts + 4, dtype=torch.float64)
        counts[filled] = 1
        counts[self.prompts :] = torch.tensor([generated, accepted, sum(raw), len(raw)], dtype=torch.float64)
        *slots, generated_, accepted_, total, count = sum_over(counts, self.ranks).tolist()
        self.open = [slot for slot in self.open if not slots[slot]]
        self.generated += int(generated_)
        self.accepted += int(accepted_)
        self.reward = self.reward[0] + total, self.reward[1] + count

    def metrics(self) -> ScalarMetrics:
        """Return filter/*: rounds, prompts generated, dropped (all equal or invalid), surplus (their slot was
        filled); and the mean reward of all samples, as `reward/mean` is of kept ones."""
        return {
            "filter/rounds": float(self.rounds),
            "filter/generated_prompts": float(self.generated),
            "filter/dropped_prompts": float(self.generated - self.accepted),
            "filter/surplus_prompts": float(self.accepted - self.prompts),
            "filter/reward_mean": self.reward[0] / self.reward[1] if self.reward[1] else 0.0,
        }
