"""The board over many long runs, and one metrics file of a gigabyte: seconds until a page shows its content.

python -m benchmarks.board [--runs 100] [--steps 10000] [--gigabytes 1]

Seconds are of this process's CPU: the time that requests wait on an idle machine."""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aligner.board import curves
from aligner.board.runs import Board
from aligner.config.freeze import to_yaml
from aligner.config.resolve import compose
from aligner.errors import AlignerError
from aligner.foreign import record

GROUPS = ("policy", "reward", "kl", "response", "memory", "mismatch", "advantage", "batch")
METRICS = [f"{group}/m{i}" for group in GROUPS for i in range(6)] + [f"time/phase{i}_s" for i in range(8)]
CHARTS = METRICS[:6]


def line(step: int, rng: random.Random) -> str:
    row = {"step": step, "wall_time": 1.7e9 + 3 * step, **{name: rng.random() for name in METRICS}}
    return json.dumps(row | {"time/step_s": 2.0 + rng.random(), "throughput/tokens_per_s": 1e5}) + "\n"


def make(folder: Path, runs: int, steps: int) -> None:
    """Make runs with one content, which costs nothing."""
    rng, config = random.Random(0), to_yaml(compose(["stage=grpo"]))
    for number in range(runs):
        run = folder / f"run_{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(config.replace("seed: 0", f"seed: {number}"))
        if number:
            shutil.copy(folder / "run_0" / "metrics.jsonl", run)
        else:
            (run / "metrics.jsonl").write_text("".join(line(step, rng) for step in range(steps)))


def ask(board: Board, endpoint: Callable[..., Any], **asked: Any) -> int:
    """Return the bytes of the answer."""
    return len(json.dumps(endpoint(board, record(asked, "benchmark", AlignerError))))


def timed(title: str, action: Callable[[], object]) -> None:
    started, before = time.monotonic(), time.process_time()
    result = action()
    seconds = time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{title:52}  {seconds:8.2f} s  ({time.monotonic() - started:.2f} passed)  {peak:5.2f} GiB  {result}",
        flush=True,
    )


def read_all(board: Board, endpoint: Callable[..., Any], **asked: Any) -> str:
    """Ask like a visible page, request after request."""
    runs, requests, longest = [board.runs()[name] for name in asked.get("runs", board.runs())], 0, 0.0
    while not requests or any(run.series.share_read < 1 for run in runs):
        before = time.process_time()
        ask(board, endpoint, **asked)
        requests, longest = requests + 1, max(longest, time.process_time() - before)
    return f"{requests} requests, the longest {longest:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make(folder / "runs", args.runs, args.steps)
        some = [f"run_{number}" for number in range(min(20, args.runs))]
        board = Board([folder / "runs"])
        size = sum(run.series.path.stat().st_size for run in board.runs().values())
        print(f"{args.runs} runs of {args.steps} steps, {len(METRICS) + 2} metrics, {size / 2**30:.2f} GiB")
        timed("first table of all runs", lambda: ask(board, curves.table))
        timed("metrics of 20 runs, until all is read", lambda: read_all(board, curves.metrics, runs=some))
        timed("6 curves of 20 runs", lambda: ask(board, curves.curves, runs=some, metrics=CHARTS))
        timed(
            "1 curve of 20 runs, 2,000 points",
            lambda: ask(board, curves.curves, runs=some, metrics=CHARTS[:1], points=2000),
        )
        timed("phases of 20 runs", lambda: ask(board, curves.phases, runs=some))
        timed("details of 20 runs, and where configs differ", lambda: ask(board, curves.details, runs=some))
        timed("table, until all is read", lambda: read_all(board, curves.table))
        timed("table again", lambda: ask(board, curves.table))
        with (folder / "runs" / "run_1" / "metrics.jsonl").open("a") as file:
            file.write(line(args.steps, random.Random(1)))
        timed("table after one more step of a run", lambda: ask(board, curves.table))
        shutil.rmtree(folder / "runs")
        large = folder / "large" / "run"
        large.mkdir(parents=True)
        body = line(0, random.Random(2)).partition(",")[2]
        with (large / "metrics.jsonl").open("w") as file:
            file.writelines(f'{{"step": {i},{body}' for i in range(int(args.gigabytes * 2**30 / (len(body) + 16))))
        board = Board([folder / "large"])
        size = (large / "metrics.jsonl").stat().st_size
        print(f"one metrics.jsonl of {size / 2**30:.2f} GiB")
        timed("first table", lambda: ask(board, curves.table))
        timed("until all is read", lambda: read_all(board, curves.table))
        timed("all curves", lambda: ask(board, curves.curves))


if __name__ == "__main__":
    main()
