"""A sample that is being generated, and its conversion to a row."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from aligner.answers import Answer
from aligner.data.dialogue import EnginePrompt
from aligner.data.tool_calls import Call
from aligner.ops.packing.routing import widened
from aligner.ops.packing.turns import Row, Turn, common, rows_of
from aligner.types import Generations, Prompt, Stop

if TYPE_CHECKING:
    from aligner.environments.pool import Session

DTYPES = {"i": torch.int32, "f": torch.float32}  # of arrays of tokens and versions, and of logprobs
OPEN_ENDS = (Stop.ANSWER, Stop.DONE)  # the trajectory ended naturally; all other stops cut it


@dataclass(eq=False)
class SampleState:
    """The state of one sample between turns. Single-turn samples have one turn and no `session`."""

    group: int  # number of its group, or of its request among those generated together
    index: int  # in its group
    seed: int  # of its request
    prompt: Prompt
    next_prompt: EnginePrompt  # for the engine
    session: Session | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)  # in the form for the template
    told: list[dict[str, Any]] = field(default_factory=list)  # behind the prompt, in the form for rewards
    turns: list[Turn] = field(default_factory=list)  # the last one may have only tokens yet
    begun: Turn | None = None  # of the next one, where the sample is paused
    calls: list[Call] = field(default_factory=list)  # in the last answer
    asked: Future[Answer] | None = None
    stop: Stop | None = None
    failure: str = ""
    rewards: list[float] = field(default_factory=list)  # of turns
    spans: list[float] = field(default_factory=list)  # seconds of the calls of each turn
    score: float | None = None
    seconds: float = 0.0
    retried: int = 0
    restarted: int = 0  # times that it began again
    again: Answer | None = None  # that says that it has to begin again
    row_prompt: Prompt | None = None  # of its request, where an environment has opened with another one
    wrong: int = 0  # calls whose result was an error
    late: int = 0  # requests of an agent that came before the previous one was answered
    rollout: int = 0  # of its request
    waits: int = 0  # of a paused sample, its number among those that wait for tools, from 1; 0: it does not wait
    ended: int = 0  # the number of the order in which it ended; 0: it has not, or orders are not counted

    STORED: ClassVar[tuple[str, ...]] = (  # of trajectories, as JSON (`rollout/store.py`)
        *("messages", "told", "failure", "rewards", "spans", "score", "seconds", "retried", "restarted", "wrong"),
        *("waits", "late"),
    )

    @property
    def open(self) -> bool:
        return self.stop is None

    @property
    def all_turns(self) -> list[Turn]:
        """The turns, and the begun one."""
        return self.turns if self.begun is None else [*self.turns, self.begun]

    @property
    def paused_tokens(self) -> Sequence[int]:
        """The tokens so far of the paused response."""
        return () if self.begun is None else self.begun.output

    @property
    def input_tokens(self) -> tuple[int, ...]:
        """The tokens that the engine begins with."""
        return (*self.next_prompt.tokens, *self.paused_tokens)

    def end(self) -> None:
        """Drop state that an ended trajectory does not need: it is stored, and sent to other ranks."""
        self.messages = []
        if self.session is not None:
            self.session.asked, self.session.answered = [], []

    def restart(self, fresh: SampleState) -> None:
        """Become `fresh`, which has not begun, with what the tries have cost."""
        tries = {"retried": self.retried, "restarted": self.restarted + 1}
        self.__dict__.update(fresh.__dict__ | tries)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the future `asked`, which no other process waits for."""
        return self.__dict__ | {"asked": None}


def grown(
    begun: Turn | None, prompt: Sequence[int], generations: Generations, row: int, before: Turn | None = None
) -> Turn:
    """Return the response to `prompt`, begun or not, extended by row `row` of `generations`. `before`: the turn before
    it."""
    begun = begun or Turn(prompt, array("i"), array("f"), None, array("i"))
    new = slice(len(begun.output), max(len(begun.output), int(generations.lengths[row])))
    full = None
    if generations.full_logprobs is not None:
        full = (begun.full or array("f")) + _array("f", generations.full_logprobs[row, new])
    routing = generations.routing
    if routing is not None:  # also of the tokens that were read
        start = 0 if before is None else max(0, common((*before.prompt, *before.output), prompt) - 1)
        routing = _continued(begun.routing, widened(routing[row][None], len(prompt) + new.stop)[0, start:])
    return Turn(
        prompt,
        begun.output + _array("i", generations.tokens[row, new]),
        begun.logprobs + _array("f", generations.logprobs[row, new]),
        full,
        begun.versions + array("i", [generations.weight_version]) * (new.stop - new.start),
        routing,
    )


def _continued(begun: Tensor | None, routing: Tensor) -> Tensor:
    """Return the routing of a turn, as a copy: a view is pickled with all rows. What was fed in earlier windows keeps
    the experts of the weights that made the tokens."""
    kept = 0 if begun is None else len(begun) - 1
    return routing.clone() if begun is None else torch.cat([begun[:kept], routing[kept:]])


def without_routing(state: SampleState) -> SampleState:
    """Return a sample whose earlier tokens have no routing."""
    if not any(turn.routing is not None for turn in state.all_turns):
        return state
    begun = state.begun and replace(state.begun, routing=None)
    return replace(state, turns=[replace(turn, routing=None) for turn in state.turns], begun=begun)


def with_routing(state: SampleState, before: SampleState) -> SampleState:
    """Return a sample that continued as `without_routing(before)`, with all routing."""
    if state.restarted > before.restarted:  # with other turns
        return state
    new = state.all_turns[len(before.turns) :]
    kept = before.begun and before.begun.routing
    if new and kept is not None:
        routing = new[0].routing
        new[0] = replace(new[0], routing=kept if routing is None else _continued(kept, routing))
    turns = [*before.turns, *new]
    return replace(state, turns=turns[: len(state.turns)], begun=state.begun and turns[-1])


def _array(kind: str, row: Tensor) -> array:
    """Convert a row without a loop over its numbers."""
    return array(kind, row.to(DTYPES[kind]).numpy().tobytes())


def by_prompt(states: Iterable[SampleState]) -> list[list[SampleState]]:
    """Return the samples of a request together that have the same next prompt, which the engine reads once. A paused
    sample is alone."""
    together: dict[tuple[int, tuple[int, ...], int], list[SampleState]] = {}
    for state in states:
        key = state.group, state.next_prompt.tokens, state.index if state.paused_tokens else -1
        together.setdefault(key, []).append(state)
    return list(together.values())


@dataclass
class Response:
    """A sample's tokens behind the prompt. Single-turn samples have no `made` and `forks`."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    full: Sequence[float] | None
    versions: Sequence[int]
    made: Sequence[bool] | None = None  # whether the policy generated it
    forks: Sequence[int] | None = None  # number of the trajectory's row that a token is in; each row is rendered anew
    routing: Tensor | None = None  # of the prompt too


def response_of(state: SampleState) -> Response:
    """Return a trajectory's rows end to end, without the prompt of the first."""
    if state.session is None:
        (turn,) = state.turns
        return Response(turn.output, turn.logprobs, turn.full, turn.versions or (), routing=turn.routing)
    joined, forks, start = Row(), list[int](), len(state.prompt.tokens)
    rows = rows_of(state.turns)
    for number, row in enumerate(rows):
        cut = start if number == 0 else 0
        joined.tokens += row.tokens[cut:]
        joined.made += row.made[cut:]
        joined.logprobs += row.logprobs[cut:]
        joined.full += row.full[cut:]
        joined.versions += row.versions[cut:]
        forks += [number] * (len(row.tokens) - cut)
    routing = [row.routing for row in rows if row.routing is not None]
    joined.routing = torch.cat(routing) if routing else None
    return Response(joined.tokens, joined.logprobs, joined.full, joined.versions, joined.made, forks, joined.routing)


def oldest_version(states: Iterable[SampleState], default: int) -> int:
    """Return the oldest version of the weights that made any of their tokens."""
    return min((min(turn.versions) for state in states for turn in state.turns if turn.versions), default=default)
