"""Training rows from the turns of a trajectory: the engine's input and output, without a token changed.

The prompt of a turn begins with all tokens of the row so far (CLEAN: the rest is appended), or with all but the last
few tokens of the last response (REALIGN: those are overwritten). Otherwise it is another text (FORK: a row of its
own). Appended tokens that the policy did not generate have mask 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TAIL = 8  # last tokens of a response that a chat template may render otherwise without starting a new row


@dataclass(frozen=True)
class Turn:
    """One response, by ids: `logprobs` of its tokens as sampled, `full` in the full tempered distribution if that was
    cut, `versions` of the weights that generated them if known, `routing` [tokens, layers, top_k] if the engine reports
    its experts: of the last tokens read and generated. Those before have the experts of the turn before. Nothing was
    fed after the last token, whose routing is 0."""

    prompt: Sequence[int]  # all tokens of the engine's input
    output: Sequence[int]  # all generated tokens, the stop token included
    logprobs: Sequence[float]
    full: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    routing: Tensor | None = None

    def all_routing(self, before: Tensor | None) -> Tensor | None:
        """Return the routing of all tokens. `before`: that of the turn before."""
        if self.routing is None or before is None:
            return self.routing
        return torch.cat([before[: len(self.prompt) + len(self.output) - len(self.routing)], self.routing])


@dataclass
class Row:
    """Tokens of a row, each with whether the policy generated it, its logprob and its version (0 if it did not)."""

    tokens: list[int] = field(default_factory=list)
    made: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routing: Tensor | None = None  # of all tokens

    def _cut(self, length: int) -> None:
        for column in (self.tokens, self.made, self.logprobs, self.full, self.versions):
            del column[length:]

    def _append(self, turn: Turn) -> None:
        suffix = turn.prompt[len(self.tokens) :]
        self.tokens += [*suffix, *turn.output]
        self.made += [False] * len(suffix) + [True] * len(turn.output)
        self.logprobs += [0.0] * len(suffix) + [*turn.logprobs]
        self.full += [0.0] * len(suffix) + [*(turn.logprobs if turn.full is None else turn.full)]
        self.versions += [0] * len(suffix) + [*([0] * len(turn.output) if turn.versions is None else turn.versions)]


def rows_of(turns: Sequence[Turn], tail: int = TAIL) -> list[Row]:
    """Return the rows of a trajectory, in the order in which they begin. Each response is in one of them, whole
    except for overwritten tokens (fewer than `tail`, and never all of it)."""
    rows: list[Row] = []
    last = 0  # tokens of the previous response
    for turn in turns:
        routing = turn.all_routing(rows[-1].routing if rows else None)
        kept = common(rows[-1].tokens, turn.prompt) if rows else 0
        if not rows or len(rows[-1].tokens) - kept >= min(tail, last):
            kept = 0
            rows.append(Row())
        rows[-1]._cut(kept)
        rows[-1]._append(turn)
        rows[-1].routing = routing
        last = len(turn.output)
    return rows


def common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many of the first tokens of both are equal."""
    shorter = min(len(held), len(prompt))
    if tuple(held[:shorter]) == tuple(prompt[:shorter]):  # the usual case: no comparison one by one
        return shorter
    return next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))
