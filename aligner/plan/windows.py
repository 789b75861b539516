"""Effects of windows (`rollout/schedule.py`) on a run with these response lengths, counted in decode steps."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from aligner.plan.decoding import decode_step
from aligner.plan.job import PlanJob
from aligner.plan.times import Machine, PhaseTime, prefill_seconds

STEPS, WARM_UP = 24, 8  # of training, and those that do not count
ROWS = 1024  # of a rollout at most: larger ones are made smaller, and the slots with them


@dataclass(frozen=True)
class Windows:
    window: int  # decode steps
    step: float  # of training, in decode steps
    engines: float  # share of the slots' time in which they decode
    trainer: float  # share of the time in which the trainer does not wait
    oldest: float  # steps of training that a sample's first token is behind, mean over samples
    mean: float  # and all tokens
    waits: float  # windows that a step waits for beside the one that runs with the last


@dataclass(frozen=True)
class RereadCost:
    """Costs of reading a paused sample again."""

    prompt: float = 0.0  # tokens before the response
    token: float = 0.0  # decode steps for each, of all replicas together


@dataclass
class _Row:
    length: int
    group: _Group
    start: int = 0  # decode step of the clock
    first: int = 0  # version of the weights of its first token
    versions: int = 0  # of its tokens, summed


@dataclass
class _Group:
    number: int
    rows: list[_Row] = field(default_factory=list)
    left: int = 0  # rows that have not ended


@dataclass
class _Clock:
    """A simulation from one row's end to the next: windows may be of one step, and rows of thousands."""

    slots: int
    window: int
    again: RereadCost
    admitted: int = 0  # groups
    taken: int = 0
    waiting: deque[_Row] = field(default_factory=deque)
    running: list[tuple[int, int, _Row]] = field(default_factory=list)  # a heap, by when they end
    ready: list[_Group] = field(default_factory=list)
    now: int = 0  # decode steps of all windows so far
    versions: int = 0  # of a row that ran from the first on, summed
    starts: int = 0  # of those that run, summed
    busy: int = 0

    def admit(self, lengths: list[int]) -> None:
        group = _Group(self.admitted, left=len(lengths))
        group.rows = [_Row(length, group) for length in lengths]
        self.waiting += group.rows
        self.admitted += 1

    def turn(self, version: int) -> float:
        """Run a window and return how long it takes. Slots go to rows in their order, and a row that has one keeps
        it."""
        over, at, ended = self.now + self.window, self.now, []
        paused = len(self.running) * self.now - self.starts  # tokens of those that resume
        read = len(self.running) * self.again.prompt + paused
        self.busy -= paused
        while True:
            while self.waiting and len(self.running) < self.slots and at < over:
                self._begin(self.waiting.popleft(), at, version)
            if not self.running or self.running[0][0] > over:
                break
            at, _, row = heapq.heappop(self.running)
            row.versions += self._versions(at, version)
            row.group.left -= 1
            self.starts -= row.start
            self.busy += row.length
            ended += [] if row.group.left else [row.group]
        self.ready += sorted(ended, key=lambda group: group.number)
        self.busy += len(self.running) * over - self.starts
        took = self.window if self.running else at - self.now
        self.versions, self.now = self._versions(over, version), over
        return took + read * self.again.token

    def _begin(self, row: _Row, at: int, version: int) -> None:
        row.start, row.first, row.versions = at, version, -self._versions(at, version)
        self.starts += at
        heapq.heappush(self.running, (at + row.length, id(row), row))

    def _versions(self, at: int, version: int) -> int:
        return self.versions + (at - self.now) * version

    def take(self, count: int) -> list[_Group]:
        """Return the first groups that are complete, none if they are fewer than `count`."""
        if len(self.ready) < count:
            return []
        groups, self.ready = self.ready[:count], self.ready[count:]
        self.taken += count
        return groups


def clocked(
    lengths: Iterator[int],
    rollout: tuple[int, int],
    lag: int,
    slots: int,
    window: int,
    rest: float,
    again: RereadCost = RereadCost(),
) -> Windows:
    """Simulate rollouts of (prompts, group) responses of these `lengths`; a step of training takes `rest` decode steps
    beside generation. New weights are not counted."""
    prompts, group = rollout
    less = max(1.0, prompts * group / ROWS)
    prompts, again = max(1, round(prompts / less)), replace(again, token=again.token * less)
    clock = _Clock(max(1, round(slots / less)), window, again)
    time = waited = 0.0
    waits = 0
    rows: list[tuple[int, _Row]] = []  # with the step that takes them

    def admit() -> None:
        while clock.admitted - clock.taken <= lag * prompts:
            for _ in range(prompts):
                clock.admit([next(lengths) for _ in range(group)])

    for step in range(STEPS):
        if step == WARM_UP:
            time, waited, waits, clock.busy, rows = 0.0, 0.0, 0, 0, []
        while not (taken := clock.take(prompts)):
            admit()
            idle = clock.turn(step)
            time, waited, waits = time + idle, waited + idle, waits + 1
        rows += [(step, row) for one in taken for row in one.rows]
        admit()
        beside = clock.turn(step)
        time, waited = time + max(beside, rest), waited + max(0.0, beside - rest)
    tokens = sum(row.length for _, row in rows)
    return Windows(
        window,
        time / (STEPS - WARM_UP),
        clock.busy / time / clock.slots,
        1 - waited / time,
        sum(step - row.first for step, row in rows) / len(rows),
        sum(step * row.length - row.versions for step, row in rows) / tokens,
        waits / (STEPS - WARM_UP),
    )


def window_of(job: PlanJob, machine: Machine, phases: Mapping[str, PhaseTime]) -> tuple[float, Windows] | None:
    """Return (seconds of a decode step with all slots, effects of windows) of `engine.window`. If it is 0, the window
    is as long as a step without refit and generation. None where that step is longer than generation, so that nobody
    waits for a long response, and where there can be no windows."""
    engine, rows = job.engine, job.rows
    assert engine is not None
    slots = replace(job, engine=replace(engine, window=engine.window or 1)).slots()[0]
    each, _ = decode_step(job, machine, slots, rows.prompt_mean + rows.response_mean / 2)
    rest_s = sum(phase.seconds for name, phase in phases.items() if name not in ("refit", "generate"))
    if not engine.window and (not engine.pauses or rest_s >= phases["generate"].seconds):
        return None
    rest = rest_s / each
    rollout = rows.prompts, max(1, rows.count // rows.prompts)
    window = engine.window or max(1, round(rest))
    mean = rows.prompt_mean + rows.response_mean / 2
    read_s = prefill_seconds(job.policy.shape, mean, mean / 2, machine, job.package) / mean
    again = RereadCost(rows.prompt_mean, read_s / engine.tensor / job.replicas / each)
    fixed = engine.lag, round(slots * job.replicas), window, rest, again
    return each, clocked(rows.lengths.drawn(), rollout, *fixed)
