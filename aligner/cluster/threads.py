"""Which threads compute with more than one core: the main one, and no other.

When a process has more OpenMP threads than cores, libgomp has them sleep after every operation instead of waiting for
the next one, and waking takes longer than a small operation. Any thread in which torch computes becomes such a team of
its own: gloo's, when they copy gathered parameters, or a reward function's. `reserve` keeps these to one core each,
`use` gives the main thread its cores.

A thread of a team waits for the others by spinning. Where other programs have their cores, that takes the core from the
one it waits for: libgomp's six milliseconds or so are longer than the others' turns. `SPINS` are about a tenth of a
millisecond, long enough for the next operation to find the team awake. Where others run they are `SPINS_BESIDE`: the
team sleeps more often, and takes less from them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"
SPINS, SPINS_BESIDE = "5000", "3000"  # measured: benchmarks/RESULTS.md
LOAD = Path("/proc/loadavg")

_given: int | None = None  # what the environment said before `reserve`
_reserved = False


def reserve() -> None:
    """Start threads with one core from now on, in this process and its children. Does nothing once torch is imported,
    which reads the environment only then."""
    if not _reserved and "torch" not in sys.modules:
        inherited()


def inherited() -> None:
    """As `reserve`, in a process forked from one that has done so, whose environment may be another."""
    global _given, _reserved
    first = os.environ.get(VARIABLE, "").split(",")[0].strip()
    _given = int(first) if first.isdecimal() and int(first) else None
    os.environ[VARIABLE], _reserved = "1", True
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS if _alone() else SPINS_BESIDE


def _alone() -> bool:
    """Whether the machine has cores for this process and for all that runs now. The least of three looks counts, as
    some of that runs for a moment only."""
    if not LOAD.exists():
        return False
    others = []
    for pause_s in (0, 0.005, 0.005):
        time.sleep(pause_s)
        running = LOAD.read_text().split()[3].partition("/")[0]
        others.append(int(running) - 1)  # without this one
    return min(others) + len(os.sched_getaffinity(0)) <= (os.cpu_count() or 1)


def use(threads: int, local_ranks: int) -> None:
    """Compute with `threads` cores in the calling thread; 0: as many as OMP_NUM_THREADS said, or this rank's share."""
    import torch

    if not _reserved and not threads and VARIABLE in os.environ:
        return
    share = max(1, (os.cpu_count() or 1) // local_ranks)
    threads = threads or _given or min(share, len(os.sched_getaffinity(0)))  # a launcher may bind each rank
    if not _reserved:
        torch.set_num_threads(threads)  # of every thread
        return
    from threadpoolctl import ThreadpoolController

    torch.get_num_threads()  # torch's own start sets this thread's number, once
    ThreadpoolController().select(user_api="openmp").limit(limits=threads)
