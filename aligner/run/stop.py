"""Stopping a run: a signal, or the end of its allocation, noticed by all ranks at the same step boundary.

The exit contract with a batch script: `DONE` in the run folder: the stage is finished. `STOPPED`: it stopped at a
step boundary with everything saved, exit code 0, and must be restarted. Exit code `errors.NO_RESTART`: a restart
would fail in the same way. Any other code: it failed.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aligner.cluster.signals import StopSignals
from aligner.config.sections.cluster import ClusterConfig
from aligner.errors import AlignerError
from aligner.files import write_whole
from aligner.foreign import read_record
from aligner.run.marker_files import PROGRESS
from aligner.run.metrics import unwritable

DEADLINE = 1000  # in place of a signal number
SAVES = 5  # the number of last saves of which the longest counts


class StopRequested(Exception):
    """The run has saved, written STOPPED, and ends here with exit code 0. Raised on every rank."""


@dataclass
class Deadline:
    """The end of the allocation, as rank 0 sees it. `step_s` is the longest time from one step boundary to the next
    so far (steps with an evaluation or a save in them included). `saves_s` are the last saves, including those of
    earlier starts: one slow save is not remembered for ever."""

    end_s: float | None = None  # of `uptime_s`; None: no end
    margin_s: float = 60.0
    step_s: float = 0.0
    saves_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAVES))

    @property
    def save_s(self) -> float:
        return max(self.saves_s, default=0.0)

    def passed(self, now_s: float) -> bool:
        """Return whether another step and the save after it might no longer fit."""
        return self.end_s is not None and now_s + self.step_s + self.save_s + self.margin_s > self.end_s


@dataclass
class Boundary:
    """Settlement of all ranks between two steps: one all-reduce of three integers on the CPU (gloo, also on GPUs)."""

    signals: StopSignals = field(default_factory=StopSignals)
    deadline: Deadline = field(default_factory=Deadline)
    clock: Callable[[], float] = time.monotonic  # that measures steps
    _last_s: float | None = None

    def settle(self, writing: bool) -> tuple[str, bool]:
        """Return (why to stop, "" to continue; whether any rank still writes a checkpoint). Collective over the
        world.

        The deadline does not count before the first step of a start: stopping there would lose the work of the start,
        and the next one would come no further.
        """
        now_s, first = self.clock(), self._last_s is None
        if self._last_s is not None:
            self.deadline.step_s = max(self.deadline.step_s, now_s - self._last_s)
        self._last_s = now_s
        late = DEADLINE * (dist.get_rank() == 0 and not first and self.deadline.passed(uptime_s()))
        flags = torch.tensor([self.signals.received, late, writing], dtype=torch.int32)
        if dist.get_world_size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        number, late, writing_ = flags.tolist()
        reason = signal.Signals(number).name if number else ""
        return reason or ("the allocation ends soon" if late else ""), bool(writing_)


def uptime_s() -> float:
    """Return seconds since the machine started, its sleep included: a clock that nobody sets (Linux)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def allocation_end(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return when this process will be killed, in seconds since the epoch: the earlier of `cluster.time_limit_s`
    after its start and the end of its Slurm job; None without either."""
    ends = [_job_end(environ)]
    if config.time_limit_s:
        ends.append(time.time() - process_age_s() + config.time_limit_s)
    return min((end for end in ends if end is not None), default=None)


def _job_end(environ: Mapping[str, str]) -> float | None:
    end, job = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_JOB_ID", "")
    if end.isdecimal():
        return float(end)
    if not job or shutil.which("squeue", path=environ.get("PATH")) is None:
        return None
    try:
        asked = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%e"], capture_output=True, text=True, timeout=30, env=dict(environ)
        )
        return datetime.datetime.fromisoformat(asked.stdout.strip()).timestamp()
    except (OSError, subprocess.TimeoutExpired, ValueError):  # no answer, or "N/A": a job without a limit
        return None


def process_age_s() -> float:
    """Return seconds since this process began (Linux)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22: ticks since boot
    return uptime_s() - started / os.sysconf("SC_CLK_TCK")


def restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is a job that Slurm has requeued: it resumes, whatever the options of its first start."""
    return environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def read_progress(run_dir: Path) -> tuple[int, list[float]]:
    """Read the newest committed step of earlier starts and the seconds of the last saves; 0 and [] without a complete
    file."""
    try:
        progress = read_record(run_dir / PROGRESS, AlignerError)
        return progress.integer("saved", 0), progress.numbers("saves_s", [])
    except AlignerError:
        return 0, []


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a small file atomically, with the time added. Raises WriteError."""
    content = {**content, "time": round(time.time(), 3)}
    try:
        write_whole(path, json.dumps(content) + "\n", durable=False)
    except OSError as cause:
        raise unwritable(path, cause) from cause
