"""What the token clock (`rollout/clock.py`) makes of response lengths, counted in decode steps."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from aligner.plan.job import Job
from aligner.plan.times import Machine, Phase, decode_step

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
class Again:
    """What it takes to read a sample that paused."""

    prompt: float = 0.0  # tokens before the response
    token: float = 0.0  # decode steps for each, of all replicas together


@dataclass
class _Row:
    left: int  # tokens
    first: int = -1  # version of the weights of its first token
    tokens: int = 0
    versions: int = 0  # summed over its tokens


@dataclass
class _Group:
    rows: list[_Row]
    ended: int = 0  # the window in which its last row ended


@dataclass
class _Clock:
    slots: int
    window: int
    again: Again
    flying: list[_Group] = field(default_factory=list)
    windows: int = 0
    busy: int = 0

    def turn(self, version: int) -> float:
        """A window; how long it takes. Slots go to rows in their order."""
        self.windows, free, end, read = self.windows + 1, [0] * self.slots, 0, 0.0
        for row in (row for group in self.flying if not group.ended for row in group.rows if row.left):
            start = heapq.heappop(free)
            if start >= self.window:
                break
            made = min(row.left, self.window - start)
            heapq.heappush(free, start + made)
            read += (self.again.prompt + row.tokens) * (row.tokens > 0)
            row.left, row.tokens, row.versions = row.left - made, row.tokens + made, row.versions + made * version
            row.first = version if row.first < 0 else row.first
            self.busy, end = self.busy + made, max(end, start + made)
        for group in self.flying:
            if not (group.ended or any(row.left for row in group.rows)):
                group.ended = self.windows
        return end + read * self.again.token

    def take(self, count: int) -> list[_Group]:
        """The first groups that are whole, none if they are fewer."""
        ready = sorted((group for group in self.flying if group.ended), key=lambda group: group.ended)[:count]
        if len(ready) < count:
            return []
        left = {id(group) for group in ready}
        self.flying = [group for group in self.flying if id(group) not in left]
        return ready


def clocked(
    lengths: Iterator[int],
    rollout: tuple[int, int],
    lag: int,
    slots: int,
    window: int,
    rest: float,
    again: Again = Again(),
) -> Windows:
    """Rollouts of (prompts, group) responses of these `lengths`; a step of training takes `rest` decode steps beside
    generation. Not counted: new weights."""
    prompts, group = rollout
    less = max(1.0, prompts * group / ROWS)
    prompts, again = max(1, round(prompts / less)), replace(again, token=again.token * less)
    clock = _Clock(max(1, round(slots / less)), window, again)
    time = waited = 0.0
    waits = 0
    rows: list[tuple[int, _Row]] = []  # with the step that takes them

    def admit() -> None:
        while len(clock.flying) <= lag * prompts:
            clock.flying += [_Group([_Row(next(lengths)) for _ in range(group)]) for _ in range(prompts)]

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
    tokens = sum(row.tokens for _, row in rows)
    return Windows(
        window,
        time / (STEPS - WARM_UP),
        clock.busy / time / clock.slots,
        1 - waited / time,
        sum(step - row.first for step, row in rows) / len(rows),
        sum(step * row.tokens - row.versions for step, row in rows) / tokens,
        waits / (STEPS - WARM_UP),
    )


def window_of(job: Job, machine: Machine, phases: Mapping[str, Phase]) -> tuple[float, Windows] | None:
    """(seconds of a decode step with all slots, what windows do): of `engine.window`, or else of one that lasts as long
    as a step without refit and generation. None where that is the longer part, so that nobody waits for a long
    response, and where there can be no windows."""
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
    read_s = job.policy.shape.num_layers * machine.layer_seconds(job.policy.shape, mean, mean / 2) / mean
    again = Again(rows.prompt_mean, read_s / engine.tensor / job.replicas / each)
    fixed = engine.lag, round(slots * job.replicas), window, rest, again
    return each, clocked(rows.lengths.drawn(), rollout, *fixed)
