"""Jobs of the shakedown: `aligner launch` in processes of their own, and the comparison of their metrics."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.errors import AlignerError
from aligner.run.metrics import read_jsonl
from aligner.shakedown.toy import ToyData

TIMEOUT_S = 900.0
Ends = str | tuple[str, ...]
TAIL_LINES = 12
# metrics in which two right runs differ: time, memory, and shares of pairs, some of which tie
UNCOMPARED = re.compile(r"(time|throughput|memory|refit)/|wall_time$|.*/accuracy$")
FLOOR = 1e-2  # differences are shares of a metric's value, or of this, if it is more


class RungError(AlignerError):
    """A rung found a fault; the text names the job, and what differs or where its log is."""


@dataclass
class ToyJob:
    name: str
    run: Path
    log: Path
    process: subprocess.Popen

    def wait(self) -> Path:
        """Return the run folder. Raises RungError if the job failed."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RungError(f"{self.name}: no end after {TIMEOUT_S:.0f} s; log: {self.log}{self._tail()}") from None
        if code:
            raise RungError(f"{self.name}: exit code {code}; log: {self.log}{self._tail()}")
        return self.run

    def kill(self) -> None:
        """Kill the launcher, with which its ranks end."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def reach(self, step: int) -> None:
        """Wait until a step is in the metrics. Raises RungError if the job ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(record["step"] >= step for record in metrics(self.run)):
                return
            time.sleep(0.02)
        self.kill()
        raise RungError(f"{self.name}: ended before step {step}; log: {self.log}{self._tail()}")

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "".join(f"\n    | {line}" for line in lines)


@dataclass(frozen=True)
class CheckedMachine:
    """The machine: its folder of jobs, the number of its GPUs (0: its CPU stands for them), and overrides for jobs on
    the device that is tested."""

    folder: Path
    gpus: int
    ranks: int  # most ranks of a job on this node
    overrides: tuple[str, ...] = ()
    nodes: int = 1  # of the Slurm job that this is in
    weights: str = ""  # folder of a model, for the rung `published`
    rows: str = ""  # folder of its data
    band: tuple[float, float] = (0.0, 1.0)  # of its accuracy

    @property
    def data(self) -> ToyData:
        return ToyData(self.folder / "data")

    @contextmanager
    def jobs(self, rung: str) -> Iterator[Starter]:
        """Yield what starts a rung's jobs, after deleting earlier ones. Those that still run at the end are killed."""
        shutil.rmtree(self.folder / "jobs" / rung, ignore_errors=True)
        starter = Starter(self, self.folder / "jobs" / rung)
        try:
            yield starter
        finally:
            for job in starter.started:
                job.kill()


class Starter:
    """Starts jobs, of which each has a folder by its name."""

    def __init__(self, machine: CheckedMachine, folder: Path):
        self.machine, self.folder, self.started = machine, folder, list[ToyJob]()

    def start(
        self, name: str, stage: str, *overrides: str, ranks: int = 1, on_cpu: bool = False, nodes: int = 1
    ) -> ToyJob:
        """Start a job on the device that is tested, or on the CPU. A folder of the same name is continued."""
        run = self.folder / (f"{name}-cpu" if on_cpu else name)
        arguments = self.machine.data.arguments(stage, run, *overrides, *(() if on_cpu else self.machine.overrides))
        return self.launch(name, run, arguments, ranks, on_cpu, nodes)

    def launch(
        self, name: str, run: Path, arguments: Sequence[str], ranks: int, on_cpu: bool = False, nodes: int = 1
    ) -> ToyJob:
        run.mkdir(parents=True, exist_ok=True)
        environ = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
        command = [sys.executable, "-m", "aligner", "launch", "--ranks", str(ranks), *arguments]
        if nodes > 1:
            environ["MASTER_ADDR"] = own_address()
            command = [*on_nodes(nodes, ranks), sys.executable, "-m", "aligner", "run", *arguments]
        log = run / "shakedown.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL, process_group=0
            )
        self.started.append(ToyJob(f"{name}, {'CPU' if on_cpu else 'device'}", run, log, process))
        return self.started[-1]

    def same_on_cpu(self, name: str, stage: str, *overrides: str, share: float, only: Ends = "") -> None:
        """Run a job on the device and on the CPU, and compare the metrics whose names end with `only`."""
        pair = [self.start(name, stage, *overrides, on_cpu=on_cpu) for on_cpu in (False, True)]
        device, cpu = [metrics(job.wait()) for job in pair]
        demand_close(name, device, cpu, share, "the CPU's", only)


def on_nodes(nodes: int, ranks: int) -> list[str]:
    """Return the words before the command of ranks, as many on each node of this Slurm job."""
    counts = [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={ranks // nodes}"]
    return ["srun", *counts, "--mpi=none", "--cpu-bind=none", "--overlap", "--mem=0", "--kill-on-bad-exit=1"]


def own_address() -> str:
    """Return this node's address, by which Slurm itself reaches it."""
    command = ["scontrol", "show", "node", "-o", os.environ["SLURMD_NODENAME"]]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.search(r"NodeAddr=(\S+)", shown)[1]


def metrics(run: Path) -> list[dict[str, Any]]:
    records = read_jsonl(run / "metrics.jsonl")
    return [{name: x for name, x in record.items() if not UNCOMPARED.match(name)} for record in records]


def distances(
    new: list[dict[str, Any]], old: list[dict[str, Any]], share: float, only: Ends = "", floor: float = FLOOR
) -> list[str]:
    """Describe metrics, whose names end with `only`, that are further apart than `share` of the old value, or of
    `floor`, if that is more; the furthest first."""
    if len(new) != len(old):
        return [f"{len(new)} steps instead of {len(old)}"]
    if not any(name.endswith(only) for record in old for name in record):
        return [f"no metric ends with {only}"]
    apart = []
    for step, (x, y) in enumerate(zip(new, old, strict=True)):
        for name in sorted(n for n in x.keys() | y.keys() if n.endswith(only)):
            a, b = x.get(name), y.get(name)
            if isinstance(a, float | int) and isinstance(b, float | int):
                distance = abs(a - b) / max(abs(b), floor)
                apart += [(distance, f"/{step}/{name}: {a} instead of {b}")] if not distance <= share else []
            elif a != b:
                apart.append((math.inf, f"/{step}/{name}: {a} instead of {b}"))
    return [text for _, text in sorted(apart, reverse=True)]


def demand_close(
    name: str, new: list[dict[str, Any]], old: list[dict[str, Any]], share: float, whose: str, only: Ends = ""
) -> None:
    """Raise RungError with the metrics that are the furthest apart, if any are."""
    if apart := distances(new, old, share, only):
        shown = "".join(f"\n    {text}" for text in apart[:5])
        raise RungError(f"{name}: {len(apart)} metrics differ from {whose} by more than {share:g} of it:{shown}")
