"""Time that passes when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from aligner.rewards import composite


class Clock:
    """Stands in for the module `time` where one thread waits: what is slept for has passed. `due`: at which time what
    is to happen meanwhile, in that order."""

    def __init__(self):
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.due and self.due[0][0] <= self.now:
            self.due.pop(0)[1]()


def times_up(monkeypatch, **states: dict[int, str]) -> None:
    """The time of a batch of rewards is up as soon as its samples are as told, and not before. By function and place:
    done, running, or waiting for a thread."""

    def state(job: Future) -> str:
        return "done" if job.done() else "running" if job.running() else "waiting"

    def waits(jobs, left_s: float, return_when: str):
        known = {(reward.name, location): job for job, (reward, places) in jobs.items() for location in places}
        wanted = {known[name, location]: how for name, places in states.items() for location, how in places.items()}
        until = time.monotonic() + 120
        while (actual := {job: state(job) for job in wanted}) != wanted:
            assert time.monotonic() < until, actual
            time.sleep(0.001)
        return wait(jobs, 0, return_when)

    monkeypatch.setattr(composite, "wait", waits)
