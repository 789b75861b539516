"""Steps beside other programs on the same cores, over their fair share.

    python -m benchmarks.busy [--loops 1,2,4,8] [--steps 5] [--stages grpo,ppo] [--ranks 1,2] [--json FILE]

A run for each stage and number of ranks, which together have as many threads as there are cores. While it runs,
endless loops of one thread each begin and end beside it. With c cores and k loops a fair share of the time is (c + k) /
c of a step's time alone. The table has the multiple of it that a step takes, by medians, and generation likewise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WARM = 2  # steps: a run gets its memory
SETTINGS = ["model=tiny", "model.init=random", "run.resume=never", "run.eval_every=0", "run.samples_every=0"]
SETTINGS += ["checkpoint.every=0"]


@contextmanager
def loops(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def arguments(folder: Path, stage: str) -> list[str]:
    data = {"train": "train", "eval": "valid"} if stage != "rm" else {"train": "pairs", "eval": "pairs"}
    files = [f"data.{key}={folder}/data/{name}.jsonl" for key, name in data.items()]
    reward_model = [f"reward.model={folder}/rm"] if stage == "ppo" else []
    return [f"experiment=quickstart_{stage}", *SETTINGS, *files, *reward_model, f"model.tokenizer={folder}/tokenizer"]


def make_task(folder: Path) -> None:
    """Write data, a tokenizer, and a reward model of one step: its scores are useless, its time is typical."""
    from aligner.run.metrics import read_jsonl
    from examples.quickstart import make_data

    make_data(folder, seed=0)
    rows = read_jsonl(folder / "data" / "train.jsonl")[:64]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{row['answer']}0"} for row in rows]
    (folder / "data" / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = [*arguments(folder, "rm"), f"run.dir={folder}/rm", "run.steps=1", "batch.sequences=64"]
    with (folder / "rm.log").open("w") as out:
        subprocess.run([sys.executable, "-m", "aligner", "run", *settings], stdout=out, stderr=out, check=True)


def measure(folder: Path, stage: str, ranks: int, counts: list[int], steps: int) -> dict[int, list[dict[str, Any]]]:
    """Return number of loops -> records of the steps that ran beside as many from their beginning to their end."""
    from aligner.run.metrics import read_jsonl

    run = folder / f"{stage}-{ranks}"
    settings = [*arguments(folder, stage), f"run.dir={run}", "run.steps=100000", "run.export=false"]
    settings += ["batch.prompts=128", "checkpoint.final=false"]
    command = [sys.executable, "-m", "aligner", "launch", "--ranks", str(ranks), *settings]
    log, metrics = folder / f"{stage}-{ranks}.log", run / "metrics.jsonl"
    environ = os.environ | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    with log.open("w") as out:
        job = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)

    def until(number: int) -> list[dict[str, Any]]:
        while True:
            records = read_jsonl(metrics) if metrics.exists() else []
            if len(records) >= number:
                return records
            if job.poll() is not None:
                raise SystemExit(f"{stage} on {ranks} ranks ended with exit code {job.returncode}: {log}")
            time.sleep(0.05)

    by_loops, done = {}, len(until(WARM))
    try:
        for count in counts:
            with loops(count):
                first = len(until(done)) + 1  # the step in which they begin is no whole one
                records = until(first + steps)
            by_loops[count], done = records[first : first + steps], len(records) + 1
            step = statistics.median(record["time/step_s"] for record in by_loops[count])
            print(f"{stage} on {ranks}, {count} loops: {step:.2f} s a step", flush=True)
    finally:
        job.terminate()
        job.wait()
    return by_loops


def rows(stage: str, ranks: int, by_loops: dict[int, list[dict[str, Any]]], cores: int) -> Iterator[dict[str, Any]]:
    for what, key in (("step", "time/step_s"), ("generation", "time/generate_s")):
        seconds = {count: statistics.median(record[key] for record in records) for count, records in by_loops.items()}
        for count in seconds:
            times = seconds[count] / seconds[0]
            row = {"stage": stage, "ranks": ranks, "what": what, "loops": count, "seconds": seconds[count]}
            yield row | {"times": times, "of_share": times * cores / (cores + count)}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main(arguments: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.common import write_json

    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=numbers, default=[1, 2, 4, 8], help="beside 0")
    parser.add_argument("--steps", type=int, default=5, help="with each number of loops")
    parser.add_argument("--stages", default="grpo,ppo")
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # its run, which has no end, and the loops end too
    folder = Path(tempfile.mkdtemp(prefix="busy-"))
    print(f"runs and logs: {folder}", flush=True)
    make_task(folder)
    cores, listed = len(os.sched_getaffinity(0)), []
    for stage, ranks in itertools.product(options.stages.split(","), options.ranks):
        listed += rows(stage, ranks, measure(folder, stage, ranks, [0, *options.loops], options.steps), cores)
    table = Table("stage", "ranks", "what", "loops", "seconds", "times alone", "of the fair share")
    for row in listed:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=100).print(table)
    write_json(options.json, {"rows": listed})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
