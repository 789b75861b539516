"""A sample on its way, and the row that it becomes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aligner.answers import Answer
from aligner.data.dialogue import Given
from aligner.data.tool_calls import Call
from aligner.ops.packing.turns import Row, Turn, rows_of
from aligner.types import Generations, Prompt, Stop

if TYPE_CHECKING:
    from aligner.environments.pool import Session

DTYPES = {"i": torch.int32, "f": torch.float32}  # of arrays of tokens and versions, and of logprobs
OPEN_ENDS = (Stop.ANSWER, Stop.DONE)  # the trajectory has come to its own end; by all others it was cut


@dataclass(eq=False)
class Play:
    """Its state between turns; of a single answer, which has no `session`, the one turn is all."""

    place: int  # of its request among those that are generated together, or the number of its group
    index: int  # in its group
    seed: int  # of its request
    prompt: Prompt
    given: Given
    session: Session | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)  # as the template gets them
    told: list[dict[str, Any]] = field(default_factory=list)  # behind the prompt, as rewards get them
    turns: list[Turn] = field(default_factory=list)  # of the last one only tokens may be there yet
    begun: Turn | None = None  # of the next one, where it pauses
    calls: list[Call] = field(default_factory=list)  # in the last answer
    asked: Future[Answer] | None = None
    stop: Stop | None = None
    failure: str = ""
    rewards: list[float] = field(default_factory=list)  # of turns
    score: float | None = None
    seconds: float = 0.0
    retried: int = 0
    wrong: int = 0  # calls that told the model an error
    late: int = 0  # requests of an agent that came before the one before them was answered
    rollout: int = 0  # of its request
    waits: int = 0  # where it pauses, its place among those that wait for tools, from 1; 0: it does not
    ended: int = 0  # the number of the order in which it did; 0: it has not, or nobody counts

    @property
    def open(self) -> bool:
        return self.stop is None

    @property
    def said(self) -> Sequence[int]:
        """Of the answer that pauses."""
        return () if self.begun is None else self.begun.output

    @property
    def read(self) -> tuple[int, ...]:
        """What the engine begins with."""
        return (*self.given.tokens, *self.said)

    def end(self) -> None:
        """Drop what nobody asks of an ended trajectory: it is stored, and goes to other ranks."""
        self.messages = []
        if self.session is not None:
            self.session.asked = []

    def __getstate__(self) -> dict[str, Any]:
        """In another process nobody waits for what was `asked`."""
        return self.__dict__ | {"asked": None}


def grown(begun: Turn | None, prompt: Sequence[int], found: Generations, row: int) -> Turn:
    """An answer to `prompt` that paused, or none yet, and what row `row` of `found` has behind it."""
    begun = begun or Turn(prompt, array("i"), array("f"), None, array("i"))
    more = slice(len(begun.output), max(len(begun.output), int(found.lengths[row])))
    full = None
    if found.full_logprobs is not None:
        full = (begun.full or array("f")) + _array("f", found.full_logprobs[row, more])
    routing = found.routing
    if routing is not None:  # of all that was read, too
        routing = routing[row, : len(prompt) + more.stop].clone()  # of its own: a view is pickled with all rows
    return Turn(
        prompt,
        begun.output + _array("i", found.tokens[row, more]),
        begun.logprobs + _array("f", found.logprobs[row, more]),
        full,
        begun.versions + array("i", [found.weight_version]) * (more.stop - more.start),
        routing,
    )


def _array(kind: str, row: Tensor) -> array:
    """Without a look at each number."""
    return array(kind, row.to(DTYPES[kind]).numpy().tobytes())


def by_prompt(plays: Iterable[Play]) -> list[list[Play]]:
    """Those of a request that the engine is given the same next, which it reads once; one that pauses by itself."""
    found: dict[tuple[int, tuple[int, ...], int], list[Play]] = {}
    for play in plays:
        found.setdefault((play.place, play.given.tokens, play.index if play.said else -1), []).append(play)
    return list(found.values())


@dataclass
class Response:
    """What stands behind a sample's prompt, token by token. Of a single answer `made` and `forks` are None."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    full: Sequence[float] | None
    versions: Sequence[int]
    made: Sequence[bool] | None = None  # whether the policy generated it
    forks: Sequence[int] | None = None  # number of the trajectory's row that it is in, each rendered anew


def response_of(play: Play) -> Response:
    """A trajectory's rows end to end, without the prompt of the first."""
    if play.session is None:
        (turn,) = play.turns
        return Response(turn.output, turn.logprobs, turn.full, turn.versions or ())
    joined, forks, start = Row(), list[int](), len(play.prompt.tokens)
    for number, row in enumerate(rows_of(play.turns)):
        cut = start if number == 0 else 0
        joined.tokens += row.tokens[cut:]
        joined.made += row.made[cut:]
        joined.logprobs += row.logprobs[cut:]
        joined.full += row.full[cut:]
        joined.versions += row.versions[cut:]
        forks += [number] * (len(row.tokens) - cut)
    return Response(joined.tokens, joined.logprobs, joined.full, joined.versions, joined.made, forks)


def oldest_version(plays: Iterable[Play], default: int) -> int:
    """Of the weights that made any of their tokens."""
    return min((min(turn.versions) for play in plays for turn in play.turns if turn.versions), default=default)
