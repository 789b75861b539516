"""Drafts: from what a row has so far (prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding), the tokens
that came behind an earlier occurrence of its last ones; from the model's own layer (`ahead.py`); or from a smaller
model (`draft_model.py`).

The engine feeds a draft with the row's next token and samples behind each. Every draw is the target's own, with the
number of its position (`sampler.uniforms`). So drafts change no sample: those that the draws repeat save passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

LONGEST, SHORTEST = 4, 2  # tokens that an earlier occurrence repeats


class DraftSource(ABC):
    """Where drafts of running rows come from; `drafts` int64 [slots, count]. One that is `cached` has keys and values
    of its own in the engine's cache, where there may be no `room` for those of the next drafts."""

    cached = False

    def __init__(self, count: int, slots: int, device: torch.device):
        self.count, self.room = count, True
        self.drafts = torch.zeros(slots, count, dtype=torch.int64, device=device)

    def add(self, slots: slice, prompt: Tensor) -> None:  # noqa: B027 (not all need it)
        """Note that rows with this prompt run in these slots."""

    def write(self, positions: Tensor, tokens: Tensor) -> None:  # noqa: B027 (not all need it)
        """Write tokens int64 [n, w] of slots [0, n), the first of each at its position, int64 [n]."""

    def move(self, source: Tensor | int, target: Tensor | int) -> None:
        self.drafts[target] = self.drafts[source]

    def follow(self, last: Tensor, longest: int) -> None:  # noqa: B027 (not all need it)
        """Read what came up to positions `last`, as `draft` does, where the next step has no drafts."""

    @abstractmethod
    def draft(self, last: Tensor, longest: int, seeds: Tensor, counts: Tensor) -> Tensor:
        """Draft what follows positions `last`, int64 [n] below `longest`, of slots [0, n), whose next draws have these
        seeds and numbers. Return bool [n]: whether a row has a draft."""


class RowTokens(DraftSource):
    """A source that has the tokens of running rows, int32 [slots, positions]."""

    def __init__(self, count: int, slots: int, positions: int, device: torch.device):
        super().__init__(count, slots, device)
        self._tokens = torch.zeros(slots, positions, dtype=torch.int32, device=device)

    def add(self, slots: slice, prompt: Tensor) -> None:
        self._tokens[slots, : len(prompt)] = prompt.to(self._tokens, non_blocking=True)

    def write(self, positions: Tensor, tokens: Tensor) -> None:
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        self._tokens[: len(tokens)].scatter_(1, positions[:, None] + ahead, tokens.int())

    def move(self, source: Tensor | int, target: Tensor | int) -> None:
        super().move(source, target)
        self._tokens[target] = self._tokens[source]


class PromptLookup(RowTokens):
    """Drafts from the tokens of running rows."""

    def draft(self, last: Tensor, longest: int, *draws: Tensor) -> Tensor:
        """See `DraftSource.draft`. A row has one if its last tokens occurred before: of several occurrences from the
        longest, of these the last."""
        tokens = self._tokens[: len(last), :longest]
        places = torch.arange(longest, device=last.device)
        same, repeated = places < last[:, None], torch.zeros_like(tokens)
        for back in range(LONGEST):
            same = same & (places >= back)
            own = tokens.gather(1, (last - back).clamp_min(0)[:, None])
            same[:, back:] &= tokens[:, : longest - back] == own
            repeated += same
        best = (repeated.long() * longest + places).max(1).values
        match = (best % longest).minimum(last - 1).clamp_min(0)
        # a draft that reaches the row's end goes on with itself
        ahead = torch.arange(self.count, device=last.device) % (last - match).clamp_min(1)[:, None]
        self.drafts[: len(last)] = tokens.gather(1, match[:, None] + 1 + ahead).long()
        return best >= SHORTEST * longest


def leading(flags: Tensor) -> Tensor:
    """Return how many flags at the beginning of each row are true: bool [n, m] -> int64 [n]."""
    return flags.long().cumprod(1).sum(1)
