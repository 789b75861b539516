"""A small process beside a rank that notices what no thread of the rank can: a call in C that never releases the GIL,
so that no Python code runs. It needs only the standard library: the process runs this file alone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

TICK_S = 2.0  # at most; faster where the limit is shorter
BUSY = 0.1  # of a tick: a process that computes less waits for something, or was stopped
LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class GilMonitor:
    """Process that sends this one SIGPROF once it has computed without a `beat` for `limit_s` seconds of wall time,
    on any number of cores. It ends with this process."""

    def __init__(self, limit_s: float):
        command = [sys.executable, "-S", "-P", __file__, str(os.getpid()), str(limit_s)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, bufsize=0, start_new_session=True
        )
        os.set_blocking(self._process.stdin.fileno(), False)

    def beat(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it was stopped, or somebody ended it
            os.write(self._process.stdin.fileno(), b".")

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def keep(rank: int, limit_s: float) -> None:
    """Run the process, with the beats on its standard input."""
    for number in LEFT_TO_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    tick_s = min(TICK_S, limit_s / 8)
    stuck_s, before_s = 0.0, 0.0
    while os.getppid() == rank:
        if select.select([0], [], [], tick_s)[0]:
            if not os.read(0, 4096):
                return
            stuck_s = 0.0
            continue
        now_s = _computed_s(rank)
        stuck_s += tick_s if now_s - before_s > BUSY * tick_s else 0.0
        before_s = now_s
        if stuck_s > limit_s:
            os.kill(rank, signal.SIGPROF)
            return


def _computed_s(pid: int) -> float:
    """Return seconds of all threads on all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    keep(int(sys.argv[1]), float(sys.argv[2]))
