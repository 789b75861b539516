"""Hundreds of terminals, of which many are killed while they work: what is left of them. A thousand take minutes:
TERMINALS=1000."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from aligner.environments.terminal import Terminal
from aligner.errors import SandboxError
from aligner.sandbox.terminal import FIRST, lacks

pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))
COUNT, AT_A_TIME = int(os.environ.get("TERMINALS", "50")), 4
GROWTH_BYTES = 8 << 20
WORK = "sleep 600 & setsid sleep 600 & echo x > /dev/shm/x; head -c 1M /dev/zero > big"


def terminal() -> Terminal:
    made = Terminal(memory_mb=64, disk_mb=8)
    made.reset(1, tests="test -e big", files={"a": "b"})
    return made


def processes() -> set[int]:
    """The processes of sandboxes, by their first one's file, and all of this process's children."""
    ours = {child.pid for child in psutil.Process().children(recursive=True)}
    lines = psutil.process_iter(["pid", "cmdline"])
    return ours | {one.info["pid"] for one in lines if str(FIRST) in (one.info["cmdline"] or ())}


def state(folder: Path) -> dict[str, object]:
    groups = [line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    roots = [Path("/sys/fs/cgroup" + group) for group in groups]
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "files": sorted(os.listdir(folder)),
        "cgroups": sorted(str(path) for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def play(number: int) -> str:
    """Open a terminal, work in it, and end it in one of five ways."""
    made = terminal()
    unshare = made._open._session._process
    kind = ("closed", "scored", "dropped", "killed from outside", "its first process killed")[number % 5]
    if kind == "scored":
        made.bash(WORK)
        return f"{kind} {made.get_reward()}"
    if kind in ("closed", "dropped"):
        made.bash(WORK)
        if kind == "closed":
            made._end()
        return kind
    (first,) = psutil.Process(unshare.pid).children()
    victim = psutil.Process(unshare.pid) if kind == "killed from outside" else first
    timer = threading.Timer(0.02, victim.kill)
    timer.start()
    try:
        made.bash(f"{WORK}; sleep 600")
    except SandboxError:
        return kind
    finally:
        timer.join()
    return "went on"


@pytest.mark.slow
def test_hundreds_of_terminals_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    others = processes()  # of other tests
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        list(threads.map(play, range(20)))  # what a worker keeps of its first ones
        gc.collect()
        before, memory = state(tmp_path), psutil.Process().memory_info().rss
        ends = Counter(threads.map(play, range(COUNT)))
        gc.collect()
        grown = psutil.Process().memory_info().rss - memory
        kinds = ("closed", "scored 1.0", "dropped", "killed from outside", "its first process killed")
        assert ends == dict.fromkeys(kinds, COUNT // len(kinds))
        until, left = time.monotonic() + 60, processes() - others
        while left:  # the kernel ends those whose first process was killed; those of other tests come and go
            assert time.monotonic() < until, left
            time.sleep(0.1)
            left &= processes()
        assert state(tmp_path) == before and before["files"] == []
        assert grown < GROWTH_BYTES
