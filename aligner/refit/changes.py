"""Of each message the numbers that changed since the last refit (`refit.skip_unchanged`).

After a step of reinforcement learning in bfloat16 with a learning rate of 1e-6 about one number in a hundred differs,
and they lie everywhere: hardly a block of 4 KB is as it was. So what travels is each changed number, and a byte or more
for how many before it did not change. The sender compares with a copy of what it sent, bit by bit: there is no hash by
which a change could be missed. What it builds on is counted, in runs that succeeded on every rank; after any other, and
in a new process on either side, all numbers travel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligner.errors import RefitError

SKIP = 255  # this byte says: so many unchanged numbers, and on with the next byte
LIMIT = 8  # a message in which more than one number in LIMIT changed goes whole: finding places takes memory
WHOLE = -1


class Head(NamedTuple):
    """What a receiver must know of a message before it comes."""

    bytes: int
    changed: int = WHOLE  # numbers in it, which changed; WHOLE: it is the message itself
    since: int = 0  # the run after which the receiver held all numbers


def encode(old: Tensor, new: Tensor) -> tuple[int, Tensor] | None:
    """How many numbers of [N] differ, and bytes: these numbers, then the gaps before them. None if too many do."""
    differs = _bits(old) != _bits(new)
    count = _count(differs)
    if count * LIMIT > len(new):
        return None
    at = differs.nonzero()[:, 0]
    gaps = at.diff(prepend=at.new_tensor([-1])) - 1
    ends = (gaps // SKIP + 1).cumsum(0)  # where each gap's last byte is, counted from 1: others say SKIP
    steps = torch.full((int(ends[-1]) if count else 0,), SKIP, dtype=torch.uint8, device=new.device)
    steps[ends - 1] = (gaps % SKIP).to(torch.uint8)
    return count, torch.cat([new[at].view(torch.uint8), steps])


def apply(data: Tensor, count: int, words: Tensor) -> None:
    """Turn `words` [N], the old numbers, into the new ones. `data`, `count`: of `encode`."""
    values, steps = data.tensor_split([count * words.itemsize])
    ends = steps != SKIP
    at = (steps.long() + ends).cumsum(0)[ends] - 1
    words[at] = values.view(words.dtype)


def _bits(x: Tensor) -> Tensor:
    """So that NaN is NaN, and 0 is not -0."""
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


def _count(differs: Tensor) -> int:
    return int(differs.count_nonzero())


class Changes:
    """Of one rank: what it sent, by the number of the message, and whether who got it holds it."""

    def __init__(self) -> None:
        self._sent: dict[int, Tensor] = {}
        self._run, self._since, self._held = 0, 0, 0

    def begin(self) -> None:
        """A run begins. If it does not end with `commit`, nobody knows what the engines hold."""
        self._run, self._since, self._held = self._run + 1, self._held, 0

    def commit(self) -> None:
        """The last run succeeded on every rank."""
        self._held = self._run

    def pack(self, number: int, words: Tensor) -> tuple[Head, Tensor]:
        """What to send of a message, as bytes; it is kept."""
        sent, found = self._sent.get(number), None
        if sent is None:
            self._sent[number] = words.clone()
        else:
            found = encode(sent, words) if self._since else None
            sent.copy_(words)
        if found is None:
            return Head(words.nbytes), words.view(torch.uint8)
        count, data = found
        return Head(data.nbytes, count, self._since), data

    def unpack(self, head: Head, data: Tensor, words: Tensor) -> None:
        """`words`: what this rank's engine holds of a message, becomes what it is to hold. Raises RefitError."""
        if head.since != self._since:
            expected = f"after run {self._since}" if self._since else "before any that succeeded"
            raise RefitError(f"what changed since run {head.since} came to an engine that is as it was {expected}")
        apply(data, head.changed, words)
