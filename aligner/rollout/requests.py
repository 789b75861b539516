"""Requests from prompts: the prompt of each slot of a rollout, and the seed of each of its samples.

A rollout has `batch.prompts` slots, dealt to data-parallel ranks in contiguous shares. All ranks take the same rows
of the stream, each makes the requests of its own slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.data.stream import Stream
from aligner.ops.seeds import request_seed
from aligner.types import Prompt


@dataclass(frozen=True)
class Request:
    """One group to generate."""

    slot: int  # of the rollout
    prompt: Prompt
    seeds: list[int]  # of its samples
    rollout: int = 0  # its number, from 1; 0: none of training


@dataclass
class Requests:
    """A maker of requests that numbers them in one rollout. A dataset row's k-th occurrence starts at sample index k
    x group, so that a small dataset never gives two samples the same request seed."""

    prompts: PromptDataset | PromptMixture
    stream: Stream
    group: int
    slots: int  # of a rollout
    own_slots: range  # those of this rank
    seed: int
    _step: int = 0
    _seen: dict[int, int] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        self._step, self._seen = step, {}

    def take(self, slots: Sequence[int]) -> list[Request]:
        """Return this rank's requests of `slots`, which get the next prompts of the stream, in this order."""
        return self.made(slots, self.stream.take(len(slots)).tolist())

    def made(self, slots: Sequence[int], rows: Sequence[int]) -> list[Request]:
        requests = []
        for slot, row in zip(slots, rows, strict=True):
            first = self._seen.get(row, 0) * self.group
            self._seen[row] = self._seen.get(row, 0) + 1
            if slot in self.own_slots:
                prompt = self.prompts[row]
                seeds = [request_seed(self.seed, self._step, prompt.id, first + i) for i in range(self.group)]
                requests.append(Request(slot, prompt, seeds, self._step))
        return requests
