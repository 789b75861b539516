"""Rollouts that are generated while earlier ones are trained on (`engine.lag`, with engines on ranks of their own).

    before step k: what is in flight lands -> weights after step k - 1 to the engines -> rollout k + lag is ordered
                   -> rollout k is scored and trained on, while the engines generate

So rollout k has the weights after step k - 1 - lag, and those before the first step where there is no such step. Seeds
and the order of prompts are those without a lag.

What lands is stored (`rollout/parts.py`, `rollout/landed.py`). A checkpoint of step k waits for rollouts k + 1 ...
k + lag, names them with the versions of their weights, which are gone, and keeps the data's place behind rollout k:
after a restart their prompts are taken again, and what was stored for them is found. Rollouts ordered since are found
likewise, so they are not generated twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist

from aligner.config.sections.watchdog import WAIT
from aligner.data.stream import Stream
from aligner.ops.agree import by_rank_0
from aligner.ops.reduce import first_cause
from aligner.rollout.generate import Generator
from aligner.rollout.groups import Groups, join_groups
from aligner.rollout.landed import read_landed, write_landed
from aligner.rollout.parts import Manifest, Parts
from aligner.rollout.requests import Request, Requests
from aligner.rollout.sharing import during
from aligner.rollout.turns import TurnGenerator
from aligner.run.checkpoints import SaveError
from aligner.types import ScalarMetrics


@dataclass
class Flight:
    """A rollout that was ordered and not trained on yet."""

    version: int  # of the weights that generate it
    requests: list[Request]
    behind: dict[str, Any]  # state of the data's stream after its prompts
    answer: Callable[[], Any] | None = None  # of the engines, which are waited for
    groups: Groups | None = None  # once it has landed
    unstored: str = ""  # why it is not stored


@dataclass
class TrainedOn:
    """The data's stream as a checkpoint keeps it: behind the prompts that were trained on."""

    stream: Stream

    def __post_init__(self) -> None:
        self.state = self.stream.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
        self.state = state


@dataclass
class Ahead:
    """All methods but those of the state are collective over the trainer's ranks."""

    lag: int
    steps: int  # of the run: none is generated for later ones
    requests: Requests
    generate: Generator | TurnGenerator
    parts: Parts
    version: Callable[[], int]  # of the policy's weights
    passed: Callable[[int], None] = lambda step: None  # told of each step that the next one follows
    metrics: ClassVar[ScalarMetrics] = {}
    _flights: dict[int, Flight] = field(default_factory=dict, init=False)  # by step
    _named: dict[int, int] = field(default_factory=dict, init=False)  # step -> version, by the checkpoint resumed from

    def __post_init__(self) -> None:
        self.data = TrainedOn(self.requests.stream)

    def __call__(self, step: int) -> Groups:
        """The rollout of `step`, unscored; with the weights that the engines have now the one that is due is ordered:
        at the start of a run all up to it. `land` comes before."""
        self.passed(step - 1)
        with self.generate.timers("generate"):
            for number in range(step, min(step + self.lag, self.steps) + 1):
                if number not in self._flights:
                    self._order(number)
            flight = self._flights.pop(step)
            self._land(step, flight)
            self.data.state = flight.behind
            assert flight.groups is not None
            return flight.groups

    def land(self) -> None:
        """Wait for the engines. Raises EngineError on every rank."""
        with self.generate.timers(WAIT):
            for number, flight in self._flights.items():
                self._land(number, flight)

    def secure(self, step: int) -> None:
        """What a checkpoint of `step` names is generated and stored. Raises EngineError or SaveError on every rank."""
        flights = {number: flight for number, flight in self._flights.items() if number <= step + self.lag}
        with self.generate.timers(WAIT):
            for number, flight in flights.items():
                self._land(number, flight)
                if flight.unstored:
                    self._store(number, flight)
        first = first_cause(next((flight.unstored for flight in flights.values() if flight.unstored), ""))
        if first is not None:
            raise SaveError(f"cannot store rollouts in {self.parts.folder}, which a checkpoint needs: {first[1]}")

    def forget(self, step: int, kept: list[int]) -> None:
        """None before `step` is resumed from, but for the checkpoints of the steps `kept`."""
        self.parts.drop(step, {number + i for number in kept for i in range(1, self.lag + 1)})

    def give_up(self, step: int) -> int:
        """The rollout of `step`, and what is stored of later ones, of a run that ends: a next start makes them anew.
        Returns the first of these. What is on its way has landed then: its answers are in the log, which may forget
        failures. Raises EngineError on every rank."""
        for number, flight in self._flights.items():
            self._await(number, flight)
        if dist.get_rank() == 0:
            for number in self.parts.steps():
                if number >= step:
                    self.parts.delete(number)
        return step

    def state_dict(self) -> dict[str, Any]:
        flying = {number: flight.version for number, flight in self._flights.items()}
        return {"in flight": {str(number): version for number, version in (self._named | flying).items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._named = {int(number): version for number, version in state["in flight"].items()}

    def _order(self, number: int) -> None:
        for earlier, flight in self._flights.items():  # engines have one order at a time
            self._land(earlier, flight)
        self.requests.begin(number)
        requests, current = self.requests.take(range(self.requests.slots)), self.version()
        version = self._named.pop(number, current)
        flight = Flight(version, requests, self.requests.stream.state_dict())
        flight.groups = self._stored(number, version, requests)
        if flight.groups is None:
            if version != current and dist.get_rank() == 0:
                print(
                    f"WARNING: rollout {number} was in flight at the checkpoint, and is not in {self.parts.folder} as "
                    f"this run (engine.lag={self.lag}) has left it: it is generated with the weights of now, version "
                    f"{current}, and not {version}. The run does not repeat one that was not stopped",
                    flush=True,
                )
            flight.version, flight.answer = current, self.generate.order(requests)
        self._flights[number] = flight

    def _land(self, number: int, flight: Flight) -> None:
        if self._await(number, flight):
            self._store(number, flight)
            if flight.unstored:
                print(f"warning: rollout {number} is not stored: {flight.unstored}", file=sys.stderr, flush=True)

    def _await(self, number: int, flight: Flight) -> bool:
        """Whether it had not landed before."""
        if flight.groups is not None:
            return False
        assert flight.answer is not None
        with during(f"rollout {number}"):
            flight.groups = self.generate.landed(flight.requests, flight.answer)
        return True

    def _store(self, number: int, flight: Flight) -> None:
        """This data-parallel rank's part."""
        assert flight.groups is not None
        if self.parts.layout.peers.rank():
            return
        try:
            with self.generate.timers("store"):
                self.parts.write(number, flight.version, partial(write_landed, flight.groups), {})
            flight.unstored = ""
        except OSError as error:
            flight.unstored = str(error)

    def _stored(self, number: int, version: int, requests: list[Request]) -> Groups | None:
        """What was stored by this run with these weights, on every rank; None if nothing was, or it is damaged."""
        manifest: Manifest | None = by_rank_0(lambda: self.parts.whole(number))
        if manifest is None or manifest[0]["weight_version"] != version:
            return None
        by_slot = {request.slot: request for request in requests}
        found = self.parts.read(number, manifest, partial(read_landed, version, by_slot))
        return None if found is None else join_groups(found)
