"""A clock that stops while this process is stopped: by SIGSTOP, in a suspended job, on a laptop that sleeps."""

from __future__ import annotations

import threading
import time

LATE = 4  # of the time between two ticks: more than a busy machine makes them late
BUSY = 0.1  # of a delay: a process that computed for that share was not stopped


class AwakeClock:
    """Clock with `now` in seconds. While `ticking`, somebody calls it at least every `every_s`. If a call comes much
    later, and this process has not used its cores, it was stopped meanwhile. Safe in threads."""

    def __init__(self, every_s: float):
        self.every_s, self.ticking, self.asleep_s = every_s, False, 0.0
        self._lock = threading.Lock()
        self._last, self._cpu = time.monotonic(), time.process_time()

    def now(self) -> float:
        with self._lock:
            here, cpu = time.monotonic(), time.process_time()
            late = here - self._last - self.every_s
            if self.ticking and late > LATE * self.every_s and cpu - self._cpu < BUSY * late:
                self.asleep_s += late
            self._last, self._cpu = here, cpu
            return here - self.asleep_s

    def start(self) -> None:
        self.now()
        self.ticking = True
