"""`run --multirun` and `launch --multirun`: run every job of a sweep, one after another, and print a table of their
results."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aligner.cluster.launch import run_one
from aligner.config.resolve import job_labels, quoted, sweep
from aligner.config.unread import compose_run
from aligner.errors import ConfigError
from aligner.run.metrics import HEADLINE, each_jsonl
from aligner.tools.report import write_after


def main(args: argparse.Namespace) -> int:
    """Run every job as a child of this command line, in the folder <run.dir>/<number>_<what varies>."""
    if args.frozen:
        raise ConfigError("--multirun", args.frozen, "no --frozen: a frozen config is one job")
    jobs = sweep(args.overrides)
    head = [sys.executable, "-m", "aligner", args.command]
    head += ["--config-dir", args.config_dir] if args.config_dir else []
    head += ["--ranks", str(args.ranks)] if args.command == "launch" else []
    head += ["--cfg"] if args.cfg else []
    common, rows = set.intersection(*map(set, jobs)), []
    # all of them compose before the first one starts
    bases = [compose_run(job, config_dir=args.config_dir).run.dir for job in jobs]
    for job, base, label in zip(jobs, bases, job_labels(jobs), strict=True):
        name, folder = " ".join(text for text in job if text not in common), str(Path(base) / label)
        started = time.monotonic()
        code, received = run_one([*head, *job, f"run.dir={quoted(folder)}"])
        code = code or (128 + received[0] if received else 0)
        rows.append((name, code, time.monotonic() - started, folder))
        if received:
            break
    if not args.cfg:
        show_jobs(rows, len(jobs))
        write_after([folder for _, _, _, folder in rows])
    return next((code for _, code, _, _ in rows if code), 0)


def show_jobs(rows: list[tuple[str, int, float, str]], total: int) -> None:
    table = Table(title=f"{len(rows)} of {total} jobs")
    for column in ("overrides", "result", "at the end", "seconds", "run.dir"):
        table.add_column(column, overflow="fold")
    for name, code, seconds, folder in rows:
        result, last = "ok" if code == 0 else f"failed ({code})", final_metric(Path(folder))
        table.add_row(name, result, f"{last[0]} {last[1]:.4g}" if last else "", f"{seconds:.1f}", folder)
    Console(soft_wrap=not sys.stdout.isatty()).print(table, markup=False)


def final_metric(folder: Path) -> tuple[str, float] | None:
    """Return the most informative metric of a run, and its last value."""
    last: dict[str, float] = {}
    for row in each_jsonl(folder / "metrics.jsonl"):
        last |= {name: row[name] for name in HEADLINE if isinstance(row.get(name), int | float)}
    return next(((name, last[name]) for name in HEADLINE if name in last), None)
