"""A thread on every rank that notices when a phase takes too long: it prints the Python stacks of all threads of all
ranks, names the phase that hangs, and ends the job.

The ranks that wait for the hanging one are asked for their stacks through a file in the run folder, because their
main threads are in a collective: <run.dir>/watchdog/fired.json, and rank-0001.txt with the stacks of rank 1.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from aligner.cluster import failure
from aligner.config.sections.cluster import Limits
from aligner.run.awake_clock import AwakeClock
from aligner.run.gil_monitor import GilMonitor

FOLDER, FIRED = "watchdog", "fired.json"
EXIT_CODE = 1
POLL_S = 2.0  # at most; faster where a limit is shorter
GRACE_S = 4.0  # for the other ranks' stacks; a launcher ends them 5 s after the first failure


class Watchdog:
    """Watchdog of this rank. Call `phase` at every change, and `start` after the ranks have met (files of an earlier
    attempt are then gone)."""

    def __init__(self, limits: Mapping[str, float], run_dir: Path, rank: int, world_size: int, stuck_s: float = 600.0):
        self.limits, self.folder, self.rank, self.world_size = Limits(limits), run_dir / FOLDER, rank, world_size
        self.poll_s = min(POLL_S, max(0.05, self.limits.shortest / 4))
        self.stuck_s = stuck_s  # this thread has not run for so long: something holds Python's lock
        self.clock = AwakeClock(self.poll_s)
        self._now = ("startup", self.clock.now())
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._keeper: GilMonitor | None = None

    @staticmethod
    def clear(run_dir: Path) -> None:
        """Remove files of an earlier attempt, on rank 0, before the ranks meet."""
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)

    def phase(self, name: str) -> None:
        """Note that a phase begins, or with "" that none runs."""
        self._now = (name, self.clock.now())

    def start(self) -> None:
        if self.limits.shortest:
            self.clock.start()
            faulthandler.register(signal.SIGPROF, file=sys.__stderr__, chain=True)  # of the keeper
            self._keeper = GilMonitor(self.stuck_s)
            self._thread = threading.Thread(target=self._guarded, args=(self._keeper,), name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self.clock.ticking = False
            self._thread.join()
            self._thread = None
            faulthandler.cancel_dump_traceback_later()
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None

    def ask_for_stacks(self, why: str) -> None:
        """Ask the other ranks for their stacks: this rank fails for a reason that may lie with another one."""
        if self.world_size > 1 and self._thread is not None:
            self._claim({"rank": self.rank, "text": why})

    def _guarded(self, keeper: GilMonitor) -> None:
        """Run the thread. If it fails, end the process: otherwise nobody would notice a hanging phase, and the keeper
        would get no beat."""
        try:
            self._watch(keeper)
        except BaseException:
            text = f"{traceback.format_exc()}error: watchdog: its thread has ended"
            print(text, file=sys.stderr, flush=True)
            failure.record(text, EXIT_CODE)
            os._exit(EXIT_CODE)

    def _watch(self, keeper: GilMonitor) -> None:
        while not self._ended.wait(self.poll_s):
            # a C thread, which needs no lock of Python's, prints the stacks; the keeper counts the seconds in which the
            # process computes, as it may have been stopped
            faulthandler.dump_traceback_later(self.stuck_s, file=sys.__stderr__)
            keeper.beat()
            now = self.clock.now()  # read first: a phase that begins meanwhile has used no time
            name, since = self._now
            key, limit_s = self.limits.of(name)
            where = f"in phase `{name or 'between phases'}` for {now - since:.0f} s ({key}={limit_s:g})"
            if limit_s and now - since > limit_s and self._claim({"rank": self.rank, "text": where}):
                self._fire(where)
            elif os.path.exists(self.folder / FIRED):  # unlike a Path's own: no error where the disk is away
                self._dump()
                if not self._ended.wait(2 * GRACE_S):  # the rank that asked ends the job
                    os._exit(EXIT_CODE)
                return

    def _claim(self, content: dict) -> bool:
        """Return whether this rank is the first that fires."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / FIRED).open("x", encoding="utf-8") as file:
                json.dump(content | {"time": time.time()}, file)
        except FileExistsError:
            return False
        except OSError as error:  # a full disk: only the stacks of this rank
            print(f"watchdog: {error}", file=sys.stderr, flush=True)
        return True

    def _fire(self, where: str) -> None:
        self._dump()
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and len(list(self.folder.glob("rank-*.txt"))) < self.world_size:
            time.sleep(0.05)
        text = f"watchdog: {self._who()} {where}"
        stacks = "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("rank-*.txt")))
        print(f"{stacks}\nerror: {text}", file=sys.stderr, flush=True)
        failure.record(f"{stacks}\nerror: {text}", EXIT_CODE)
        os._exit(EXIT_CODE)

    def _who(self) -> str:
        """Describe the rank that hangs: one that gives no stacks, or one that is in no collective while others are.
        It need not be this one, which may only be the first whose limit ends."""
        waits = {}
        for rank in range(self.world_size):
            path = self._stacks(rank)
            waits[rank] = _in_collective(path.read_text(errors="replace")) if path.exists() else None
        silent = [rank for rank, waiting in waits.items() if waiting is None]
        free = [rank for rank, waiting in waits.items() if waiting is False]
        if silent:
            return f"{_ranks(silent)} gives no stacks, its process hangs or is stopped; rank {self.rank} is"
        if 0 < len(free) < self.world_size:
            return f"{_ranks(free)} hangs, the others wait for it; rank {self.rank} is"
        return f"rank {self.rank} is"

    def _stacks(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:04d}.txt"

    def _dump(self) -> None:
        """Dump the stacks of all threads of this rank to a file, for the rank that fired, and to the log."""
        name, since = self._now
        path = self._stacks(self.rank)
        aside = path.with_suffix(".tmp")
        try:
            with aside.open("w", encoding="utf-8") as file:
                where = name or "between phases"
                main = f"main thread 0x{threading.main_thread().ident:016x}"
                file.write(f"--- rank {self.rank}: phase `{where}` since {self.clock.now() - since:.0f} s, {main}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            aside.rename(path)
        except OSError as error:
            print(f"watchdog: {error}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


def _in_collective(stacks: str) -> bool:
    """Return whether the main thread, which the first line names, waits for other ranks."""
    head, _, rest = stacks.partition("\n")
    main = rest.partition(f"hread {head.rpartition(' ')[2]} (")[2].partition("\n\n")[0]
    return "torch/distributed/" in main


def _ranks(numbers: list[int]) -> str:
    return f"rank {', '.join(map(str, numbers))}"
