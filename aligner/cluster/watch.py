"""`slurm/watch RUN_DIR...`: state, progress, goodput, GPU-hours and time left of a chain. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from aligner.cluster import triage
from aligner.cluster.lock import user_here
from aligner.errors import AlignerError
from aligner.foreign import parse_json, read_record, record
from aligner.pipe import quiet_pipe

FAILURES = ("failed", "refused")  # outcomes in attempts.tsv
COLUMNS = ("run", "state", "step", "s/step", "attempts", "goodput", "rank-hours", "left")


@dataclass(frozen=True)
class Attempt:
    job: str
    start_s: float
    end_s: float | None  # None: it runs, or it was killed and left no record
    ranks: int


@dataclass(frozen=True)
class Status:
    run: str
    state: str
    step: int
    total: int
    step_s: float | None  # of the last steps
    attempts: int
    goodput: float | None  # seconds of steps that count / seconds allocated
    rank_hours: float  # GPU-hours where a rank has a GPU
    left_s: float | None


def attempts(run: Path, alive: bool, now_s: float) -> list[Attempt]:
    """Return the attempts that launchers/body.sh recorded. An attempt without an end ended when the next began. The
    last one is running if its job is `alive`, else its end is the last write to its logs."""
    tries: list[Attempt] = []
    for kind, job, _attempt, epoch, _step, _what, ranks in recorded(run):
        if tries and tries[-1].end_s is None:
            tries[-1] = replace(tries[-1], end_s=float(epoch))
        if kind == "start":
            tries.append(Attempt(job, float(epoch), None, int(ranks)))
    if tries and tries[-1].end_s is None:
        last = tries[-1]
        sign = max((p.stat().st_mtime for p in run.glob("logs/*/rank-*.log")), default=last.start_s)
        tries[-1] = replace(last, end_s=now_s if alive else max(sign, last.start_s))
    return tries


def recorded(run: Path) -> list[list[str]]:
    """Return the rows that the batch script wrote, without those that a full disk or a kill has cut."""
    path = run / "logs" / "attempts.tsv"
    lines = _text(path).splitlines()
    whole = re.compile(r"(start|end)(\t[^\t]*){2}\t\d{1,12}(\t[^\t]*){2}\t\d{1,9}", re.ASCII)
    return [line.split("\t") for line in lines if whole.fullmatch(line)]


def status(run: Path, jobs: dict[str, str], now_s: float) -> Status:
    """Return a run's status. `jobs`: state of each job in the queue by its number."""
    state = state_of(run, jobs)
    tries = attempts(run, state == "RUNNING", now_s)
    times = step_times(run)
    step, total = newest_step(run, times), total_steps(run)
    recent = sorted(list(times.values())[-20:])
    step_s = recent[len(recent) // 2] if recent else None
    allocated = allocated_s(tries, now_s)
    used = sum(((a.end_s or now_s) - a.start_s) * a.ranks for a in tries)
    return Status(
        run=str(run),
        state=state,
        step=step,
        total=total,
        step_s=step_s,
        attempts=len(tries),
        goodput=min(1.0, sum(times.values()) / allocated) if allocated and times else None,
        rank_hours=used / 3600,
        left_s=(total - step) * step_s if step_s is not None and state != "DONE" else None,
    )


def state_of(run: Path, jobs: dict[str, str]) -> str:
    """Return the job's state in the queue, or how the run ended. Without a scheduler a job is RUNNING if its process is
    here. `failed`: by an error of a rank or of the batch script. `ended`: the job is over and nobody recorded why (a
    cancelled job, a node that is gone)."""
    job, outcome = last_job(run)
    state = jobs.get(job, "")
    if job == "local" and user_here(run) is not None:
        state = "RUNNING"
    if (run / "DONE").exists() and state != "RUNNING":
        return "DONE"
    if state or outcome in FAILURES or triage.refused(run):
        return state or "failed"
    return "stopped" if (run / "STOPPED").exists() else "ended" if job else "not started"


def allocated_s(tries: list[Attempt], now_s: float) -> float:
    return sum((a.end_s or now_s) - a.start_s for a in tries)


def last_job(run: Path) -> tuple[str, str]:
    """Return the number of the newest attempt's job, and the outcome of the attempt if it has one."""
    rows = recorded(run)
    return (rows[-1][1], rows[-1][5]) if rows else ("", "")


def step_times(run: Path) -> dict[int, float]:
    """Return the seconds of each step that counts: a resumed run cuts the others from metrics.jsonl."""
    path, seconds = run / "metrics.jsonl", {}
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(AlignerError):  # one that is being written, or that a full disk has damaged
            fields = record(parse_json(line, str(path), AlignerError), str(path), AlignerError)
            if "time/step_s" in fields:
                seconds[fields.integer("step")] = fields.number("time/step_s")
    return seconds


def newest_step(run: Path, times: dict[int, float]) -> int:
    steps = [*times, 0]
    with contextlib.suppress(AlignerError):
        steps.append(read_record(run / "progress.json", AlignerError).integer("step"))
    return max(steps)


def total_steps(run: Path) -> int:
    """Return run.steps of the frozen config, whose sections are in columns."""
    path = run / "config.yaml"
    match = re.search(r"^run:\n(?:  .*\n)*?  steps: (\d{1,18})$", _text(path), re.M)
    return int(match[1]) if match else 0


def _text(path: Path) -> str:
    """Return the text of a file with any content; empty if it does not exist."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def queue() -> dict[str, str]:
    """Return the state of every job in the queue, empty without Slurm. A dead controller must not block."""
    try:
        argv = ["squeue", "-h", "-o", "%A %T"]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    words = (line.split(None, 1) for line in done.stdout.splitlines())
    return {line[0]: line[1] for line in words if len(line) == 2}


def expand(folders: list[str]) -> list[Path]:
    """Return run folders; for a folder that contains runs (a chain, a sweep) those, in the order of their start."""
    runs: list[Path] = []
    for folder in map(Path, folders):
        inside = [p.parent for p in folder.glob("*/config.yaml")]
        inside.sort(key=lambda p: (p / "config.yaml").stat().st_mtime)
        runs += [folder] if (folder / "config.yaml").exists() or not inside else inside
    return runs


def table(rows: list[Status]) -> str:
    lines = [COLUMNS]
    for row in rows:
        lines.append(
            (
                row.run,
                row.state,
                f"{row.step}/{row.total or '?'}",
                f"{row.step_s:.2f}" if row.step_s is not None else "-",
                str(row.attempts),
                f"{row.goodput:.0%}" if row.goodput is not None else "-",
                f"{row.rank_hours:.2f}",
                clock(row.left_s),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slurm/watch", description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="RUN_DIR", help="run folders, or a folder of them")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="repeat until all runs are done")
    args = parser.parse_args(argv)
    while True:
        jobs = queue()
        rows = [status(run, jobs, time.time()) for run in expand(args.folders)]
        print(table(rows), flush=True)
        if not args.every or all(row.state == "DONE" for row in rows):
            return 0
        time.sleep(args.every)
        print()


if __name__ == "__main__":
    with quiet_pipe(), contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
