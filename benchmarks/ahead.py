"""GRPO's step while the engine generates the next rollout (engine.lag) over the step in which both alternate.

    python -m benchmarks.ahead [--pairs 3] [--lags 1,2] [--windows 40] [--folder DIR] [--json FILE]

One trainer's rank and one engine's, one thread each, and a small random model whose responses have long-tailed lengths
(any of five digits ends one). Runs alternate: lag 0, each lag, and lag 1 with windows of so many decode steps
(engine.window). The table has medians of a run's steps after the first two, and the ratio to the synchronous run of the
same round. Beside it stands the least possible ratio there: the longer of generation and training over their sum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM = 2  # steps: an engine starts its first rollouts, and memory is got
SETTINGS = ["experiment=quickstart_grpo", "model=tiny", "model.init=random", "engine.ranks=1"]
SETTINGS += ["sampling.max_response_tokens=160", "batch.prompts=16", "batch.micro_batch_samples=64"]
SETTINGS += ["sampling.stop=['0','1','2','3','4']"]
SETTINGS += ["run.resume=never", "run.eval_every=0", "run.samples_every=0", "run.export=false", "checkpoint.every=0"]


def measure(folder: Path, name: str, steps: int, lag: int, window: int = 0) -> dict[str, float]:
    """Return the median seconds of a step, of its generation (as the trainer saw it) and of the rest."""
    from aligner.run.metrics import read_jsonl

    root, run = folder / "task", folder / name
    data = [
        f"data.train={root}/data/train.jsonl",
        f"data.eval={root}/data/valid.jsonl",
        f"model.tokenizer={root}/tokenizer",
    ]
    clock = [f"engine.lag={lag}", f"engine.window={window}"]
    settings = [*SETTINGS, *data, *clock, f"run.dir={run}", f"run.steps={steps}"]
    command = [sys.executable, "-m", "aligner", "launch", "--ranks", "2", *settings]
    log = folder / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}: {log}")
    rows = read_jsonl(run / "metrics.jsonl")[WARM:]
    step = statistics.median(row["time/step_s"] for row in rows)
    waited = statistics.median(row["time/generate_s"] + row.get("time/wait_s", 0.0) for row in rows)
    tokens = statistics.median(row["response/tokens_mean"] for row in rows)
    return {"step_s": step, "generate_s": waited, "train_s": step - waited, "tokens": tokens}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main(arguments: list[str]) -> int:
    from benchmarks.common import write_json
    from examples.quickstart import make_data

    parser = argparse.ArgumentParser(prog="python -m benchmarks.ahead", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--lags", type=numbers, default=[1], help="beside 0")
    parser.add_argument("--windows", type=numbers, default=[], help="decode steps, with lag 1")
    parser.add_argument("--steps", type=int, default=10, help="of a run")
    parser.add_argument("--folder", type=Path, help="where runs and their logs stay; a temporary one if empty")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ahead-"))
    print(f"runs and logs: {folder}", flush=True)
    make_data(folder / "task", seed=0)
    cases = {"lag 0": (0, 0)} | {f"lag {lag}": (lag, 0) for lag in options.lags}
    cases |= {f"window {window}": (1, window) for window in options.windows}
    rounds = []
    print(
        f"{'round':>5}  {'case':<12}{'step s':>9}{'generate s':>12}{'train s':>9}{'ratio':>8}{'least':>8}", flush=True
    )
    for number in range(options.pairs):
        together = None
        for case, clock in cases.items():
            row = measure(folder, f"{number}-{case.replace(' ', '-')}", options.steps, *clock)
            together = together or row
            least = max(together["generate_s"], together["train_s"]) / together["step_s"]
            row |= {"round": number, "case": case, "ratio": row["step_s"] / together["step_s"], "least": least}
            shown = f"{row['step_s']:9.2f}{row['generate_s']:12.2f}{row['train_s']:9.2f}{row['ratio']:8.2f}{least:8.2f}"
            print(f"{number:5}  {case:<12}{shown}", flush=True)
            rounds.append(row)
    for case in list(cases)[1:]:
        ratio = statistics.median(row["ratio"] for row in rounds if row["case"] == case)
        print(f"{case}: {ratio:.2f} of the synchronous step (median of {options.pairs})")
    write_json(options.json, {"rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
