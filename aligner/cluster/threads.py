"""Threads that compute with more than one core: the main one, and no other.

If a process has more OpenMP threads than cores, libgomp has them sleep after every operation instead of waiting for the
next one. Waking takes longer than a small operation. Any thread in which torch computes gets such a team of its own:
gloo's, when they copy gathered parameters, or a reward function's. `reserve` keeps these to one core each, `use` gives
the main thread its cores.

A thread of a team waits for the others by spinning. `SPINS` are about a tenth of a millisecond, long enough for the
next operation to find the team awake. If other programs want the cores, a spinning thread takes one from the thread
that it waits for. So while its threads wait for cores, a process has one OpenMP thread more than there are cores, which
does nothing, and libgomp has all of them sleep. Meanwhile its threads ask for many short turns instead of few long ones
(Linux from 6.12 on; no more time in all), so that the next operation begins when the last of them has had its own. If
others want as much as a team of two on two cores, the second thread shares the core of the main thread. A waiting
thread then makes room for the one it waits for, and need not wait until the other core has given other programs their
turns.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"
SPINS = "5000"  # measured: benchmarks/log.md
TASKS = Path("/proc/self/task")
LOOK_S = 0.25
CROWDED, FREE = 0.15, 0.05  # share of the time in which threads that would run wait for a core: from here on, and below
HALF, IDLE = 0.4, 0.25  # likewise, where others want as much as a team of two; of a core, which they have left
WATCH = "who wants the cores"
SHORT_NS = 100_000  # the shortest turn that Linux gives
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call, which Python does not have
GRAIN = 1 << 15  # elements that torch gives a thread at least

_omp_threads: int | None = None  # OMP_NUM_THREADS before `reserve`
_reserved = False


def reserve() -> None:
    """Start threads with one core from now on, in this process and its children. Does nothing once torch is imported,
    which reads the environment only then."""
    if not _reserved and "torch" not in sys.modules:
        inherited()


def inherited() -> None:
    """Do the same as `reserve` in a process forked from one that has done so, with another environment."""
    global _omp_threads, _reserved
    first = os.environ.get(VARIABLE, "").split(",")[0].strip()
    _omp_threads = int(first) if first.isdecimal() and int(first) else None
    os.environ[VARIABLE], _reserved = "1", True
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def use(threads: int, local_ranks: int) -> None:
    """Compute with `threads` cores in the calling thread; 0: as many as OMP_NUM_THREADS said, or this rank's share."""
    import torch

    if not _reserved and not threads and VARIABLE in os.environ:
        return
    share = max(1, (os.cpu_count() or 1) // local_ranks)
    threads = threads or _omp_threads or min(share, len(os.sched_getaffinity(0)))  # a launcher may bind each rank
    if not _reserved:
        torch.set_num_threads(threads)  # of every thread
        return
    from threadpoolctl import ThreadpoolController

    torch.get_num_threads()  # torch's own start sets this thread's number, once
    ThreadpoolController().select(user_api="openmp").limit(limits=threads)
    ours = threads > 1 and os.environ.get("GOMP_SPINCOUNT") == SPINS and TASKS.exists()
    if ours and all(thread.name != WATCH for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(threads, threading.get_native_id()), daemon=True, name=WATCH).start()


def _watch(team: int, main: int) -> None:
    """Have the team sleep while other programs want the cores, and spin while they do not."""
    turns, idle_s, pause_s = _turns(), 0.0, LOOK_S
    sleeps: threading.Event | None = None
    follower: int | None = None  # the thread that shares the main thread's core
    while True:
        time.sleep(pause_s)
        start = time.perf_counter()
        before, turns = turns, _turns()
        # a small share of the time, with any number of threads
        slept_s, pause_s = pause_s, max(LOOK_S, 100 * (time.perf_counter() - start))
        ran, waited = ({thread: turns[thread][i] - before.get(thread, (0, 0))[i] for thread in turns} for i in (0, 1))
        wanted = sum(ran.values()) + sum(waited.values())
        left = False  # by the other programs
        if follower is not None:
            _bind(follower, {_core(main)})
            idle_before, idle_s = idle_s, _idle_s(main)
            left = idle_s - idle_before > IDLE * slept_s
        if wanted < LOOK_S / 10 * 1e9:  # it computes nothing
            continue
        share = sum(waited.values()) / wanted
        if sleeps is None and share > CROWDED:
            sleeps = threading.Event()
            _ask_for_turns(SHORT_NS)
            threading.Thread(target=_one_too_many, args=(team, sleeps), daemon=True, name="one too many").start()
        elif sleeps is not None and (left or share < FREE):
            _ask_for_turns(0)
            sleeps.set()
            if follower is not None:
                _bind(follower, os.sched_getaffinity(main))
            sleeps = follower = None
        elif follower is None and share > HALF and team == len(os.sched_getaffinity(main)) == 2:
            others = ran.keys() - {main, *(thread.native_id for thread in threading.enumerate())}
            follower, idle_s = max(others, key=ran.__getitem__, default=None), _idle_s(main)


def _turns() -> dict[int, tuple[int, int]]:
    """Return the nanoseconds for which each thread of this process ran, and waited for a core."""
    times = {}
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has just ended
            ran, waited, _ = (task / "schedstat").read_text().split()
            times[int(task.name)] = int(ran), int(waited)
    return times


def _idle_s(thread: int) -> float:
    """Return the seconds since the system's start in which the thread's cores were idle."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    own = {f"cpu{core}" for core in os.sched_getaffinity(thread)}
    return sum(int(idle) for name, _, _, _, idle, *_ in lines if name in own) / os.sysconf("SC_CLK_TCK")


def _core(thread: int) -> int:
    """Return the core that the thread runs on, or has run on last."""
    return int((TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()[36])


def _bind(thread: int, cores: set[int]) -> None:
    with suppress(OSError):  # it has just ended
        os.sched_setaffinity(thread, cores)


def _ask_for_turns(nanoseconds: int) -> None:
    """Ask for turns of this length for all threads of this process; 0: the default length. Earlier kernels ignore
    it."""
    call, libc = SCHED_SETATTR.get(platform.machine()), ctypes.CDLL(None)
    if call is None:
        return
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has just ended
            thread = int(task.name)
            policy, nice = os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)
            if policy in (os.SCHED_OTHER, os.SCHED_BATCH):
                wanted = struct.pack("=IIQiIQQQ", 48, policy, 0, nice, 0, nanoseconds, 0, 0)  # sched_attr, version 0
                libc.syscall(call, thread, wanted, 0)


def _one_too_many(team: int, ended: threading.Event) -> None:
    """Start a second team, with which libgomp manages one thread more than it has cores. It ends with this thread."""
    import torch
    from threadpoolctl import ThreadpoolController

    torch.get_num_threads()
    size = max(2, (os.cpu_count() or 1) - team + 2)
    ThreadpoolController().select(user_api="openmp").limit(limits=size)
    torch.ones(size * GRAIN).mul_(1.0)
    ended.wait()
