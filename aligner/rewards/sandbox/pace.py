"""Time as a process could have computed in it, on a machine that others load. Runs inside the sandbox."""

from __future__ import annotations

import time

WINDOW_S = 1.0  # after which the pace is measured again
BURST_S = 0.02  # that is computed to measure it
STANDS_S = 3.0  # a longer time between two looks is not a run's: the machine stood still


class Clock:
    """`spent` grows by the seconds for which a run had the machine, divided by how much longer than its own time a
    burst of computing takes. On a machine that has a core for it, that is by the clock on the wall."""

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
