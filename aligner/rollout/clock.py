"""The token clock: samples that pause after a window of decode steps and go on with newer weights (`engine.window`).

    before step k: the window in flight lands -> weights after step k - 1 to the engines -> while fewer groups are ready
                   than a rollout has, another window, which the trainer waits for -> the first that are ready are
                   taken -> the next window is ordered -> the groups are scored and trained on, while it runs

A window is so many decode steps of every replica with one version of weights. What has not ended then pauses: its
tokens stay, with logprobs and the version of each, and the next window reads them again with its own weights. Groups
are numbered as they are without a lag, which gives them their prompts and seeds; they are taken in the order of (window
in which the last sample ended, number), and at most (lag + 1) rollouts of them are in flight. So everything follows
from counts: no sample hangs on how long something took.

All ranks of the trainer know all samples in flight (the bank). Global rank 0 stores the bank as each window lands; a
checkpoint names its last one, and a window that was stored since is read again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from aligner.config.sections.watchdog import WAIT
from aligner.ops.agree import by_rank_0
from aligner.ops.reduce import first_cause, gathered
from aligner.rollout.bank import Bank, Whole, read_bank, write_bank
from aligner.rollout.generate import Generator
from aligner.rollout.groups import Groups
from aligner.rollout.parts import Manifest
from aligner.rollout.pauses import PausingGenerator
from aligner.rollout.play import Play, by_prompt
from aligner.rollout.requests import Request, Requests
from aligner.rollout.sharing import during, share
from aligner.run.checkpoints import SaveError
from aligner.types import ScalarMetrics


@dataclass
class Clock:
    """All methods but those of the state are collective over the trainer's ranks."""

    lag: int
    window: int  # decode steps of each
    steps: int  # of the run
    requests: Requests  # of all slots
    mine: range  # slots of this data-parallel rank
    generate: Generator | PausingGenerator
    parts: Whole
    version: Callable[[], int]  # of the policy's weights
    passed: Callable[[int], None] = lambda step: None  # told of each step that the next one follows
    metrics: ScalarMetrics = field(default_factory=dict, init=False)  # of the last step
    _window: int = field(default=0, init=False)  # the last one that was ordered
    _flown: int = field(default=0, init=False)  # the version of its weights
    _rollouts: int = field(default=-1, init=False)  # whose groups were admitted; -1: not known before the first step
    _prompts: dict[int, list[int]] = field(default_factory=dict, init=False)  # of rollouts in flight, by number
    _groups: dict[int, Request] = field(default_factory=dict, init=False)  # in flight, by number
    _windows: dict[int, int] = field(default_factory=dict, init=False)  # step -> the window that was ordered last in it
    _whole: int = field(default=0, init=False)  # the step of the last whole checkpoint
    _answer: Callable[[], list[Play]] | None = field(default=None, init=False)  # of the engines, which are waited for
    _unstored: dict[int, str] = field(default_factory=dict, init=False)  # window -> why it is not stored
    _oldest: int = field(default=1, init=False)  # rollout of a group that was in flight at the last step
    _named: list[int] | None = field(default=None, init=False)  # groups that the checkpoint resumed from has in flight

    def __post_init__(self) -> None:
        self._bank = self._fresh([])

    def __call__(self, step: int) -> Groups:
        """The rollout of `step`, unscored. `land` comes before, and the weights."""
        size, before = self.requests.slots, self._window
        self.passed(step - 1)
        self._rollouts = max(self._rollouts, step - 1)
        with self.generate.timers("generate"):
            while len(self._bank.ready()) < size:
                self._order()
                flying = len(self._bank.numbers)
                assert flying >= size, f"{flying} groups in flight, {self._rollouts} of {self.steps} rollouts came in"
                self._land()
            waited, bank = self._window - before, self._bank
            self.metrics = {
                "window/steps": float(self.window),
                "window/waited_for": float(waited),
                "window/groups_in_flight": float(len(bank.numbers)),
                "window/groups_ready": float(len(bank.ready())),
                "window/samples_paused": float(sum(play.open and bool(play.turns or play.said) for play in bank.plays)),
            }
            groups = self._take(bank.ready()[:size])
            self._order()
        self._windows[step] = self._window
        return groups

    def land(self) -> None:
        """Wait for the engines. Raises EngineError on every rank."""
        if self._named is not None:
            self._restore(self._named)
        with self.generate.timers(WAIT):
            self._land()

    def secure(self, step: int) -> None:
        """What a checkpoint of `step` names is generated and stored. Raises EngineError or SaveError on every rank."""
        with self.generate.timers(WAIT):
            self._land()
        if self._window in self._unstored:
            self._store()
        first = first_cause(self._unstored.get(self._windows.get(step, self._window), ""))
        if first is not None:
            raise SaveError(f"cannot store samples in {self.parts.folder}, which a checkpoint needs: {first[1]}")

    def forget(self, step: int, kept: list[int]) -> None:
        """None before `step` is resumed from, but for the checkpoints of the steps `kept`."""
        self._whole = step
        self._windows = {number: window for number, window in self._windows.items() if number in kept or number >= step}
        if step in self._windows:
            self.parts.drop(self._windows[step], set(self._windows.values()))

    def give_up(self, step: int) -> int:
        """All that is in flight, of a run that ends with the rollout of `step`: a next start makes it anew. Returns the
        first rollout whose groups are in flight, or were until now."""
        self._land()
        self._bank = self._fresh(self._bank.numbers)
        self.parts.clear()
        return self._oldest

    def state_dict(self) -> dict[str, Any]:
        last = max(self._windows, default=0)  # none between is resumed from once its checkpoint is whole
        return {
            "window": self._window,
            "version": self._flown,
            "rollouts": self._rollouts,
            "prompts": {str(number): rows for number, rows in self._prompts.items()},
            "groups": self._bank.numbers if self._named is None else self._named,
            "windows": {str(step): at for step, at in self._windows.items() if step <= self._whole or step == last},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window, self._flown, self._rollouts = state["window"], state["version"], state["rollouts"]
        self._prompts = {int(number): rows for number, rows in state["prompts"].items()}
        self._windows = {int(step): window for step, window in state["windows"].items()}
        self._whole = max(self._windows, default=0)
        self._named = state["groups"]

    # --- windows

    def _order(self) -> None:
        """The next window: read if it is stored, else ordered if there is something to generate."""
        while self._rollouts < self.steps and len(self._bank.numbers) <= self.lag * self.requests.slots:
            self._admit()
        self._window, self._flown = self._window + 1, self.version()
        stored = self._stored()
        if stored is not None:
            self._bank = stored
            return
        plays, layout = by_prompt(self._bank.open()), self.parts.layout
        if plays:
            self._answer = self.generate.go_on(plays[share(len(plays), layout.data, layout.dp_rank)])
        elif self._bank.numbers:  # all are ready: what was taken of them is to be known
            self._store()

    def _admit(self) -> None:
        """The groups of the next rollout."""
        self._rollouts += 1
        self._prompts[self._rollouts] = self.requests.stream.take(self.requests.slots).tolist()
        self._bank = self._bank.add(self._fresh(self._known(self._rollouts)))

    def _known(self, rollout: int) -> list[int]:
        """The numbers of its groups, whose requests are made."""
        self.requests.begin(rollout)
        size = self.requests.slots
        found = self.requests.made(range(size), self._prompts[rollout])
        numbers = [(rollout - 1) * size + request.slot for request in found]
        self._groups |= dict(zip(numbers, found, strict=True))
        return numbers

    def _fresh(self, numbers: list[int]) -> Bank:
        """Groups of which nothing is generated."""
        plays = [play for number in numbers for play in self.generate.fresh(self._groups[number], number)]
        return Bank(self.requests.group, numbers, plays)

    def _land(self) -> None:
        if self._answer is None:
            return
        with during(f"window {self._window}"):
            mine = self._answer()
        self._answer = None
        found = [play for part in gathered(mine, self.parts.layout.pgs.dp) for play in part]
        self._bank.update(found, self._window)
        self._store()

    def _take(self, places: list[int]) -> Groups:
        """This rank's slots of the groups at `places`, which leave the bank."""
        self._oldest = self._bank.numbers[0] // self.requests.slots + 1
        taken = self._bank.take(places)
        self._bank = self._bank.take(sorted(set(range(len(self._bank.numbers))) - set(places)))
        groups = [replace(self._groups.pop(number), slot=slot) for slot, number in enumerate(taken.numbers)]
        left = {number // self.requests.slots + 1 for number in self._groups}
        self._prompts = {rollout: rows for rollout, rows in self._prompts.items() if rollout in left}
        oldest = min((min(turn.versions) for play in taken.plays for turn in play.turns), default=self._flown)
        return self.generate.ended([groups[slot] for slot in self.mine], taken.take(self.mine).plays, oldest)

    # --- what is stored

    def _store(self) -> None:
        """By global rank 0; told there, and by a checkpoint that needs it."""
        self._unstored.pop(self._window, None)
        if dist.get_rank() != 0:
            return
        try:
            with self.generate.timers("store"):
                told = {"groups": self._bank.numbers}
                self.parts.write(self._window, self._flown, partial(write_bank, self._bank), told)
        except OSError as error:
            self._unstored[self._window] = str(error)
            print(f"warning: window {self._window} is not stored: {error}", file=sys.stderr, flush=True)

    def _stored(self) -> Bank | None:
        """The bank as this window left it in this run, with these groups and weights, on every rank; None if that is
        not there, or damaged."""
        manifest: Manifest | None = by_rank_0(lambda: self.parts.whole(self._window))
        if manifest is None or manifest[0]["weight_version"] != self._flown:
            return None
        if manifest[0]["groups"] != self._bank.numbers:
            return None
        found = self.parts.read(self._window, manifest, partial(read_bank, self._bank))
        return None if found is None else found[0]

    def _restore(self, numbers: list[int]) -> None:
        """What the checkpoint has in flight. Where it is not there it begins again, which is told."""
        self._named = None
        if any(len(rows) != self.requests.slots for rows in self._prompts.values()):
            self._tell(f"{len(numbers)} groups were in flight at the checkpoint, of another batch.prompts: left out")
            self._rollouts, self._prompts = -1, {}
            return
        for rollout in self._prompts:
            self._known(rollout)
        self._groups = {number: self._groups[number] for number in numbers}
        self._bank = self._fresh(numbers)
        stored = self._stored() if numbers else None
        if stored is not None:
            self._bank = stored
        elif numbers:
            if dist.get_rank() == 0:
                for number in self.parts.steps():
                    if number > self._window:  # what followed is of what is lost
                        self.parts.delete(number)
            self._tell(
                f"{len(numbers)} groups were in flight at the checkpoint, and window {self._window} is not in "
                f"{self.parts.folder} as this run (engine.window, engine.lag, engines) has left it: they are generated "
                "anew"
            )

    @staticmethod
    def _tell(what: str) -> None:
        if dist.get_rank() == 0:
            print(f"WARNING: {what}. The run does not repeat one that was not stopped", flush=True)
