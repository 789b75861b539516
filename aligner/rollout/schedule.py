"""The schedule of rollouts: generated `engine.lag` steps before they are trained on, to their ends or a window of
decode steps at a time (`engine.window`).

    before step k: wait for the order in flight -> weights after step k - 1 to the engines -> while fewer groups are
                   ready than a rollout has, give another order and wait for it -> take the first ready groups -> give
                   the order that is due -> score and train on the groups, while the engines generate

Without windows an order is one rollout, to its end: rollout k has the weights after step k - 1 - lag, and those before
the first step where there is no such step. With lag 0 that is a synchronous step. With windows an order is so many
decode steps of every replica. Samples that have not ended then pause: their tokens stay, with logprobs and the version
of each, and the next window reads them again with its own weights. Groups are taken in the order of (order in which the
last sample ended, number), and at most lag + 1 rollouts of them are in flight. So everything follows from counts: no
sample depends on timing, and prompts and seeds are those without a lag.

Without windows a data-parallel rank has the groups of its own slots; with windows all ranks have all in flight. Each
order is stored as it lands (`rollout/store.py`). A checkpoint names the last one, which has all that is in flight
then. A resumed run reads orders stored after that too, so no sample is generated twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from aligner.config.sections.cluster import WAIT
from aligner.ops.agree import fail_together
from aligner.ops.reduce import gathered_messages
from aligner.rollout.groups import Groups
from aligner.rollout.requests import Request, Requests
from aligner.rollout.sample_generator import SampleGenerator, Score
from aligner.rollout.sample_state import SampleState, by_prompt, oldest_version
from aligner.rollout.sharing import during, share
from aligner.rollout.store import InFlight, Store
from aligner.run.checkpoints import SaveError
from aligner.types import SamplingParams, ScalarMetrics


@dataclass
class Schedule:
    """A schedule of rollouts. All methods but those of the state are collective over the trainer's ranks."""

    lag: int
    window: int  # decode steps of each; 0: orders are of whole rollouts
    steps: int  # of the run: no rollout is generated for later ones
    requests: Requests  # of this rank's slots; with windows of all
    own_slots: range  # of this data-parallel rank
    generator: SampleGenerator
    version: Callable[[], int]  # of the policy's weights
    ranks: dist.ProcessGroup  # data-parallel
    store: Store | None = None  # None: nothing is stored
    passed: Callable[[int], None] = lambda step: None  # called with each finished step before the next one
    metrics: ScalarMetrics = field(default_factory=dict, init=False)  # of the last step
    _order: int = field(default=0, init=False)  # number of the last order
    _made_by: int = field(default=0, init=False)  # the version of its weights
    _name: str = field(default="", init=False)  # of the order, in messages
    _rollouts: int = field(default=-1, init=False)  # that were admitted; -1: not known before the first step
    _prompts: dict[int, list[int]] = field(default_factory=dict, init=False)  # rows of rollouts in flight, by number
    _groups: dict[int, Request] = field(default_factory=dict, init=False)  # in flight, by number
    _orders: dict[int, int] = field(default_factory=dict, init=False)  # step -> the last order in it
    _whole: int = field(default=0, init=False)  # the step of the last whole checkpoint
    _answer: Callable[[], list[SampleState]] | None = field(default=None, init=False)  # waits for the engines
    _unstored: dict[int, str] = field(default_factory=dict, init=False)  # order -> why it is not stored
    _oldest: int = field(default=1, init=False)  # rollout of a group that was in flight at the last step
    _named: list[int] | None = field(default=None, init=False)  # groups that the checkpoint resumed from has in flight

    def __post_init__(self) -> None:
        self._flight = self._fresh([])

    # --- rollouts

    def collect(self, step: int) -> None:
        """Wait for the engines, before `step` and its weights. Raises EngineError on every rank."""
        if self._named is not None:
            self._restore(step, self._named)
        elif self._rollouts < 0 and step > 1 and self.lag:
            self._warn("the checkpoint lists no samples in flight: they are generated again, with the current weights")
        self._collect()
        if step > 1:
            self._orders[step - 1] = self._order
        self.passed(step - 1)
        self._rollouts = max(self._rollouts, step - 1)

    def __call__(self, step: int, score: Score | None = None) -> Groups:
        """Return the rollout of `step`, unscored. Call `collect` and sync the weights first."""
        size, before = len(self.requests.own_slots), self._order
        groups = None
        while groups is None:
            with self.generator.timers("generate"):
                landed = False
                if len(self._flight.ready()) < size:
                    self._give_order(step, score)
                    landed = self._landed()
                flight = self._flight
                assert len(flight.numbers) >= size, f"{self._rollouts} of {self.steps} rollouts were admitted"
                if len(ready := flight.ready()) >= size:
                    if self.window:
                        self.metrics = self._measured(self._order - before)
                    groups = self._take(ready[:size])
            if landed:
                self._keep(flight)
        if self.window:
            with self.generator.timers("generate"):
                self._give_order(step)
        while not self.window and self._rollouts < min(step + self.lag, self.steps):
            self._collect("generate")  # engines have one order at a time
            with self.generator.timers("generate"):
                self._give_order(step)
        return groups

    def generate_now(
        self, requests: list[Request], sampling: SamplingParams | None = None, score: Score | None = None
    ) -> Groups:
        """Return the groups of these requests, by a separate order while no rollout is in flight."""
        assert not self.lag, "the next prompts must not depend on scores"
        kept, numbers = self._flight, [request.seeds[0] for request in requests]  # no other request has them
        states = self.generator.fresh_of(numbers, requests)
        self._flight = InFlight(len(requests[0].seeds) if requests else 1, numbers, states)
        with self.generator.timers("generate"):
            self._start(f"rollout {self._rollouts + 1}", sampling, score)
            landed = self._landed()
            made, self._flight = self._flight, kept
            groups = self.generator.ended(requests, made.states, oldest_version(made.states, self._made_by), sampling)
        if landed:
            self._keep(made)
        return groups

    # --- checkpoints

    def store_in_flight(self, step: int) -> None:
        """Generate and store everything that a checkpoint of `step` names. Raises EngineError or SaveError on every
        rank."""
        if self.lag:  # without a lag, an open order of a failed engine belongs to a later step
            self._collect()
        named = self._orders.setdefault(step, self._order)  # a step that failed may have given orders since
        if self._order in self._unstored and self._flight.numbers:
            self._keep(self._flight)
        cause = self._unstored.get(named, "") if self.lag else ""
        if cause and self.store is not None:
            cause = f"cannot store samples in {self.store.folder}, which a checkpoint needs: {cause}"
        fail_together(cause, SaveError)

    def forget(self, step: int, kept: list[int]) -> None:
        """Forget orders before `step`, from which no run is resumed any more, except from the steps `kept`."""
        self._whole = step
        self._orders = {number: order for number, order in self._orders.items() if number in kept or number >= step}
        if step in self._orders and self.store is not None:
            self.store.drop(self._orders[step], set(self._orders.values()) if self.lag else ())

    def drop_in_flight(self, step: int) -> int:
        """Forget all samples in flight, and delete the stored ones, in a run that ends with the rollout of `step`:
        the next start generates them again. Return the first rollout that this concerns."""
        self._collect()
        self._flight = self._fresh(self._flight.numbers)
        if self.store is not None:
            self.store.delete_after(0 if self.window else self._orders.get(step - 1 - self.lag, 0))
        return self._oldest

    def state_dict(self) -> dict[str, Any]:
        last = max(self._orders, default=0)  # no run is resumed from steps between once this checkpoint is whole
        return {
            "window": self._order,
            "version": self._made_by,
            "rollouts": self._rollouts,
            "prompts": {str(number): rows for number, rows in self._prompts.items()},
            "groups": self._in_flight() if self._named is None else self._named,
            "windows": {str(step): at for step, at in self._orders.items() if step <= self._whole or step == last},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._made_by, self._rollouts = state["window"], state["version"], state["rollouts"]
        self._prompts = {int(number): rows for number, rows in state["prompts"].items()}
        self._orders = {int(step): order for step, order in state["windows"].items()}
        self._whole = max(self._orders, default=0)
        self._named = state["groups"]

    # --- orders

    def _give_order(self, step: int, score: Score | None = None) -> None:
        """Give the next order: admit groups, read their samples if they are stored, else order them if there are
        any."""
        if self.window:
            while self._rollouts < self.steps and len(self._flight.numbers) <= self.lag * self.requests.slots:
                self._admit()
        elif not self._flight.open():
            self._admit()
        assert self.window or self._rollouts <= step + self.lag
        self._start(f"window {self._order + 1}" if self.window else f"rollout {self._rollouts}", score=score)

    def _start(self, name: str, sampling: SamplingParams | None = None, score: Score | None = None) -> None:
        """Start an order. `name`: of the order, in messages."""
        self._order, self._made_by, self._name = self._order + 1, self.version(), name
        if self.store is not None:
            stored = self.store.read(self._order, self._made_by, self._flight)
            if stored is not None:
                self._flight = stored
                return
        together = by_prompt(self._flight.open())
        if self.window and not together:
            if self._flight.numbers:  # all are ready: the store must know which were taken
                self._keep(self._flight)
            return
        if self.window:  # all ranks have all samples: each generates its share
            together = together[share(len(together), self.ranks.size(), self.ranks.rank())]
        self._answer = self.generator.advance(together, sampling, score)

    def _admit(self) -> None:
        """Admit the groups of the next rollout."""
        self._rollouts += 1
        self._prompts[self._rollouts] = self.requests.stream.take(self.requests.slots).tolist()
        self._flight = self._flight.add(self._fresh(self._known(self._rollouts)))

    def _known(self, rollout: int) -> list[int]:
        """Make the requests of a rollout; return the numbers of its groups."""
        self.requests.begin(rollout)
        size = self.requests.slots
        made = self.requests.made(range(size), self._prompts[rollout])
        numbers = [(rollout - 1) * size + request.slot for request in made]
        self._groups |= dict(zip(numbers, made, strict=True))
        return numbers

    def _in_flight(self) -> list[int]:
        """Return the numbers of all ranks' groups."""
        if self.window:
            return self._flight.numbers
        size = self.requests.slots
        return [(rollout - 1) * size + slot for rollout in self._prompts for slot in range(size)]

    def _fresh(self, numbers: list[int]) -> InFlight:
        """Return groups before any generation."""
        states = self.generator.fresh_of(numbers, [self._groups[number] for number in numbers])
        return InFlight(self.requests.group, numbers, states)

    def _landed(self) -> bool:
        """Wait for the engines, if they generate; return whether they did."""
        if self._answer is None:
            return False
        with during(self._name):
            states = self._answer()
        self._answer = None
        if self.window:
            states = [state for own in gathered_messages(states, self.ranks) for state in own]
        self._flight.update(states, self._order)
        return True

    def _collect(self, timer: str = WAIT) -> None:
        """Wait for the engines, if they generate, and store their samples."""
        if self._answer is not None:
            with self.generator.timers(timer):
                self._landed()
            self._keep(self._flight)

    def _take(self, indices: list[int]) -> Groups:
        """Return this rank's slots of the groups at `indices`, which are no longer in flight."""
        self._oldest = self._flight.numbers[0] // self.requests.slots + 1
        taken = self._flight.take(indices)
        self._flight = self._flight.take(sorted(set(range(len(self._flight.numbers))) - set(indices)))
        requests = [self._groups.pop(number) for number in taken.numbers]
        left = {number // self.requests.slots + 1 for number in self._groups}
        self._prompts = {rollout: rows for rollout, rows in self._prompts.items() if rollout in left}
        version = oldest_version(taken.states, self._made_by)
        if self.window:
            requests = [replace(requests[slot], slot=slot) for slot in self.own_slots]
            taken = taken.take(self.own_slots)
        return self.generator.ended(requests, taken.states, version)

    def _measured(self, waited: int) -> ScalarMetrics:
        flight = self._flight
        return {
            "window/steps": float(self.window),
            "window/waited_for": float(waited),
            "window/groups_in_flight": float(len(flight.numbers)),
            "window/groups_ready": float(len(flight.ready())),
            "window/samples_paused": float(sum(p.open and bool(p.turns or p.paused_tokens) for p in flight.states)),
        }

    # --- storage

    def _keep(self, flight: InFlight) -> None:
        """Store the samples that the last order left in flight. A failure is reported here, and raised by a
        checkpoint that needs these samples."""
        self._unstored.pop(self._order, None)
        if self.store is None:
            return
        try:
            with self.generator.timers("store"):
                self.store.write(self._order, self._made_by, flight)
        except OSError as error:
            self._unstored[self._order] = str(error)
            print(f"warning: {self._name} is not stored: {error}", file=sys.stderr, flush=True)

    def _restore(self, step: int, numbers: list[int]) -> None:
        """Restore the samples in flight at the checkpoint, before `step`. Missing ones begin again, which is
        reported."""
        self._named = None
        if not self._continues(step, numbers):
            self._warn(
                f"{len(numbers)} groups were in flight at the checkpoint, with another batch.prompts, engine.lag "
                "or engine.window: they are left out"
            )
            self._rollouts, self._prompts = -1, {}
            return
        for rollout in self._prompts:
            self._known(rollout)
        self._groups = {number: self._groups[number] for number in numbers if number in self._groups}
        self._flight = self._fresh(list(self._groups))
        stored = None
        if numbers and self.store is not None:
            stored = self.store.read(self._order, self._made_by, self._flight)
        if stored is not None:
            self._flight = stored
        elif numbers:
            if self.store is not None:
                self.store.delete_after(self._order)  # later orders of the lost samples
            self._warn(
                f"{len(numbers)} groups were in flight at the checkpoint, but "
                f"{self.store.folder if self.store else 'the run folder'} does not have them with this engine.lag and "
                "engine.window: they are generated again, with the current weights"
            )

    def _continues(self, step: int, numbers: list[int]) -> bool:
        """Return whether these groups may be in flight: without windows whole rollouts, none later than the lag
        allows."""
        if any(len(rows) != self.requests.slots for rows in self._prompts.values()):
            return False
        if self.window:
            return True
        return sorted(numbers) == sorted(self._in_flight()) and max(self._prompts, default=0) <= step + self.lag

    @staticmethod
    def _warn(what: str) -> None:
        if dist.get_rank() == 0:
            print(f"WARNING: {what}. Results may differ from those of a run that was not stopped", flush=True)
