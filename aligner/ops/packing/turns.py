"""The turns of a trajectory -> training rows: what the engine was given and what it said, without a token changed.

What the engine is given for a turn either begins with all that is held of the row so far (CLEAN: the rest is appended),
or with all but the last few tokens of the last answer (REALIGN: those are overwritten), or is another text (FORK: a row
of its own). Appended tokens that the policy did not generate have mask 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TAIL = 8  # tokens of an answer's end that a chat template may render otherwise without the row being a new one


@dataclass(frozen=True)
class Turn:
    """One answer, by ids: `logprobs` of its tokens as sampled, `full` in the full tempered distribution where that was
    cut, `versions` of the weights that made them where that is known, `routing` [tokens read and generated, layers,
    top_k] where the engine tells its experts."""

    prompt: Sequence[int]  # all that the engine was given
    output: Sequence[int]  # all that it generated, the stop token included
    logprobs: Sequence[float]
    full: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    routing: Tensor | None = None


@dataclass
class Row:
    """Of each token whether the policy generated it, and its logprobs and version (0 where it did not)."""

    tokens: list[int] = field(default_factory=list)
    made: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def _cut(self, length: int) -> None:
        for column in (self.tokens, self.made, self.logprobs, self.full, self.versions):
            del column[length:]

    def _append(self, turn: Turn) -> None:
        given = turn.prompt[len(self.tokens) :]
        self.tokens += [*given, *turn.output]
        self.made += [False] * len(given) + [True] * len(turn.output)
        self.logprobs += [0.0] * len(given) + [*turn.logprobs]
        self.full += [0.0] * len(given) + [*(turn.logprobs if turn.full is None else turn.full)]
        self.versions += [0] * len(given) + [*([0] * len(turn.output) if turn.versions is None else turn.versions)]


def rows_of(turns: Sequence[Turn], tail: int = TAIL) -> list[Row]:
    """The rows of a trajectory, in the order in which they begin. Each answer is in one of them, whole but for what was
    overwritten (less than `tail` tokens, and never all of it)."""
    rows: list[Row] = []
    last = 0  # tokens of the answer before
    for turn in turns:
        kept = common(rows[-1].tokens, turn.prompt) if rows else 0
        if not rows or len(rows[-1].tokens) - kept >= min(tail, last):
            kept = 0
            rows.append(Row())
        rows[-1]._cut(kept)
        rows[-1]._append(turn)
        last = len(turn.output)
    return rows


def common(held: Sequence[int], given: Sequence[int]) -> int:
    """How many of the first tokens of both are the same."""
    shorter = min(len(held), len(given))
    if tuple(held[:shorter]) == tuple(given[:shorter]):  # as it is mostly: no look at each
        return shorter
    return next((i for i, (a, b) in enumerate(zip(held, given, strict=False)) if a != b), min(len(held), len(given)))
