"""Processes of rehearsed ranks, forked from this one: as many at a time as there are cores, and as memory allows.
Imports no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aligner.files import write_whole
from aligner.rehearse.record import RehearsalRecord

SUFFIX = ".spoken"  # of the file with a rank's messages
POLL_S = 0.1
RESERVE_BYTES = 1 << 30  # of memory that stays free while several run
CGROUP = Path("/sys/fs/cgroup")
# said of a process that was killed
KILLED = "Linux does that where memory is short. Free some: a rank alone needs more than there is"
Work = Callable[[dict[str, Any]], None]


def free_bytes() -> int:
    """Return the memory that is free, on the machine and in its container."""
    free = [1024 * int(re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[0])]
    limit = CGROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()).isdecimal():
        files = re.findall(r"^inactive_file (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        free.append(int(most) - int((CGROUP / "memory.current").read_text()) + sum(map(int, files)))
    return min(free)


def fork(cases: Sequence[dict[str, Any]], processes: int, work: Work) -> None:
    """Run `work`, which does not return, on each case in a process of its own: at most `processes` at a time, and
    another one only where the largest so far would fit. Where memory is short nevertheless, the last one is ended, and
    begins again later. Exits where Linux has killed one: no program does that to itself, so it says nothing about the
    job."""
    running: dict[int, dict[str, Any]] = {}
    waiting, largest = list(cases), 0
    while waiting or running:
        while waiting and len(running) < processes:
            if running and free_bytes() < RESERVE_BYTES + largest:
                break
            case = waiting.pop(0)
            child = os.fork()
            if child == 0:
                work(case)
            running[child] = case
        child, status, usage = os.wait4(-1, os.WNOHANG)
        if child:
            largest = max(largest, usage.ru_maxrss * 1024)
            _note_end(running.pop(child), status)
        elif len(running) > 1 and free_bytes() < RESERVE_BYTES:
            waiting.insert(0, _taken_back(*running.popitem()))
            processes = len(running)
        else:
            time.sleep(POLL_S)


def _taken_back(child: int, case: dict[str, Any]) -> dict[str, Any]:
    """End the process of a case, of which no other one reads that still runs, and return the case as it was."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    out = Path(case["out"])
    out.with_suffix(SUFFIX).write_bytes(b"")
    shutil.rmtree(out.with_suffix(".run"), ignore_errors=True)
    return case


def _note_end(case: dict[str, Any], status: int) -> None:
    if not Path(case["out"]).is_file():
        if (ended := os.waitstatus_to_exitcode(status)) == -signal.SIGKILL:
            sys.exit(f"the process of rank {case['rank']} was killed: {KILLED}")
        _record(case, ended)
    send(1, rank=case["rank"], ended=True)


def send(pipe: int, **event: Any) -> None:
    """Write an event at once, so that events of several processes do not mix."""
    os.write(pipe, json.dumps(event).encode() + b"\n")


def _record(case: dict[str, Any], code: int) -> None:
    """Write the record of a process that C++ has ended, whose stack is in the log."""
    record, out = RehearsalRecord(), Path(case["out"])
    log = out.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    frames = re.findall(r'File ".*/(aligner/[^"]+)", line (\d+)', log)
    places = [f"{file}:{line}" for file, line in frames if not file.startswith("aligner/rehearse/")]
    text = f"the process ended with {code}: {' '.join(log.split())[:500]}"
    record.errors.append({"phase": "?", "place": places[0] if places else "?", "text": text})
    usage = {"rank": case["rank"], "cpu_s": 0.0, "host_bytes": 0, "transformer_engine_lacks": None}
    write_whole(out, json.dumps(record.data() | usage))
