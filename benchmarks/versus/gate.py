"""Protocol of a contestant and the benchmark: between two steps it reports the last one's time, and waits for the next
order. So the contestants' steps alternate, and one of them computes at a time."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Over(Exception):
    """The end of the benchmark's steps."""


class Gate:
    """A gate between steps. Reports CPU seconds of one thread, which exclude other programs, and wall seconds of
    several."""

    def __init__(self, threads: int) -> None:
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print goes with the errors
        self._since: float | None = None

    def say(self, **what: Any) -> None:
        self._out.write(json.dumps(what) + "\n")

    def __call__(self, **fields: Any) -> None:
        """Report the last step at a step boundary, and wait. Raises Over."""
        now = self._clock()
        if self._since is not None:
            self.say(seconds=now - self._since, peak_bytes=peak_bytes(), **fields)
        line = sys.stdin.readline()
        if line.strip() != "go":
            raise Over
        self._since = self._clock()


def peak_bytes() -> int:
    """Return the largest resident set of this process, without its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")
