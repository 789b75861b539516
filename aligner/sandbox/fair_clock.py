"""A clock of the time that a process could compute, on a machine under other load. Runs inside the sandbox."""

from __future__ import annotations

import time

WINDOW_S = 1.0  # after which the pace is measured again
BURST_S = 0.02  # length of the computation that measures it
STANDS_S = 3.0  # a longer time between two looks is not counted: the machine was suspended


class FairClock:
    """A clock whose `spent` grows by a run's seconds, divided by the slowdown of a burst of computing.

    On a machine with a free core that is wall time.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self.computed = 0.0  # CPU time of the runs that have ended
        self._passed = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self.look()
        self._since = time.monotonic()

    def stop(self) -> None:
        self.look()
        self._since = None

    def look(self) -> None:
        if self._since is not None:
            now = time.monotonic()
            self._passed += min(now - self._since, STANDS_S)
            self._since = now
        if self._passed >= WINDOW_S:
            self.spent += self._passed / _slowness()
            self._passed = 0.0
            self._since = self._since and time.monotonic()


def _slowness() -> float:
    begun, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < BURST_S:
        continue
    return max(1.0, (time.monotonic() - begun) / BURST_S)
