"""A trajectory on its way, and the row that it becomes."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from aligner.answers import Answer
from aligner.data.dialogue import Given
from aligner.data.tool_calls import Call
from aligner.environments.pool import Session
from aligner.ops.packing.turns import Row, Turn, rows_of
from aligner.types import Prompt, Stop

OPEN_ENDS = (Stop.ANSWER, Stop.DONE)  # the trajectory has come to its own end; by all others it was cut


@dataclass(eq=False)
class Play:
    """Its state between turns."""

    place: int  # of its request in this peer's share
    index: int  # in its group
    seed: int  # of its request
    prompt: Prompt
    session: Session
    given: Given
    messages: list[dict[str, Any]]  # as the template gets them
    told: list[dict[str, Any]] = field(default_factory=list)  # behind the prompt, as rewards get them
    turns: list[Turn] = field(default_factory=list)  # `full` of the last one is not there yet
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

    @property
    def open(self) -> bool:
        return self.stop is None


def by_prompt(plays: Iterable[Play]) -> list[list[Play]]:
    """Those of a request that the engine is given the same next, which it reads once."""
    found: dict[tuple[int, tuple[int, ...]], list[Play]] = {}
    for play in plays:
        found.setdefault((play.place, play.given.tokens), []).append(play)
    return list(found.values())


def joined_rows(play: Play) -> tuple[Row, list[int]]:
    """A trajectory's rows end to end, without the prompt of the first, and the number of each token's row."""
    rows, start = rows_of(play.turns), len(play.prompt.tokens)
    found, forks = Row(), []
    for number, row in enumerate(rows):
        cut = start if number == 0 else 0
        found.tokens += row.tokens[cut:]
        found.made += row.made[cut:]
        found.logprobs += row.logprobs[cut:]
        found.full += row.full[cut:]
        forks += [number] * (len(row.tokens) - cut)
    return found, forks
