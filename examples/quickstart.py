"""The quick start: a small model from random weights to SFT, a reward model, GRPO and PPO, on two-digit sums.

    python -m examples.quickstart [--ranks N] [KEY=VALUE ...]

Every stage is the ordinary command line with an experiment of conf/experiment/quickstart_*.yaml. KEY=VALUE are Hydra
overrides for all stages (seed=1, parallel.tensor=2, ...); run.dir=FOLDER moves everything.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligner.cluster import fork_server
from aligner.cluster.launch import STOPS
from aligner.config.freeze import freeze_start
from aligner.config.resolve import compose, quoted
from aligner.config.schema import Config
from aligner.errors import AlignerError, ConfigError
from aligner.pipe import quiet_pipe
from aligner.run.launched import imports, launch_run
from aligner.run.marker_files import STOPPED
from aligner.run.memory import peak_rss_bytes
from aligner.run.metrics import read_jsonl
from aligner.tools.child_call import call_in_child

STAGES = ("sft", "rm_init", "rm", "grpo", "ppo")
HERE = "examples.quickstart"
POLICIES = ("sft", "rm_init", "grpo", "ppo")
OWN_IMPORTS = ("examples.pairs", "aligner.tools.evaluate")  # needed only by this tool
QUESTIONS = 15900  # of the 16,200 there are: finding the last ones by drawing takes long
SPLITS = {"train": 0.85, "valid": 0.05, "test": 0.10}  # by hash of the question: disjoint by construction
VOCABULARY = 320


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="quickstart", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    # two processes of one thread are faster than two threads: at this size much of a step is not matrix products
    ranks = min(2, os.cpu_count() or 1)
    parser.add_argument("--ranks", type=int, default=ranks, help=f"ranks of every stage (default here: {ranks})")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args, rest = parser.parse_known_args(argv)
    args.overrides += rest
    try:
        return Quickstart(args.overrides, args.ranks).run()
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


class Quickstart:
    def __init__(self, overrides: list[str], ranks: int):
        folders = [text.partition("=")[2].strip("'\"") for text in overrides if text.startswith("run.dir=")]
        self.root = Path(folders[-1] if folders else "runs/quickstart")
        self.overrides = [text for text in overrides if not text.startswith("run.dir=")]
        self.ranks = ranks
        self.seconds: dict[str, float] = {}
        self.before_s = _cpu_seconds()  # of the shell that has become this process, with an installation

    def run(self) -> int:
        """Run all stages. Returns 0, or the exit code of the stage that failed. Bad overrides raise AlignerError before
        any work."""
        configs = {stage: compose(self.arguments(stage)) for stage in STAGES}
        self.begin()
        start = time.perf_counter()
        modules = {module: None for cfg in configs.values() for module in imports(cfg)}
        with fork_server.kept([*modules, *OWN_IMPORTS], dict(os.environ), STOPS):  # all stages share its imports
            code = self.stages(configs)
            if code:
                return code
            accuracy = call_in_child(f"{HERE}:accuracies", self.root, [configs[stage] for stage in POLICIES])
        summary = summarize(self.root, configs, accuracy, self.seconds, self.ranks, self.cpu_seconds())
        show(summary, time.perf_counter() - start)
        from aligner.tools import report

        return report.main([str(self.root / stage) for stage in STAGES])

    def stages(self, configs: dict[str, Config]) -> int:
        self.say(f"making data and tokenizer in {self.root}")
        call_in_child(f"{HERE}:make_data", self.root, configs["sft"].seed)
        for stage in STAGES:
            if stage == "rm":
                self.timed(stage, lambda: call_in_child(f"{HERE}:write_pairs", self.root, configs["rm"]))
            code = self.timed(stage, lambda stage=stage: self.stage(stage, configs[stage]))
            if (self.root / stage / STOPPED).exists():
                print(f"stage {stage} was asked to stop; the same command continues it", file=sys.stderr)
                return code or 1
            if code:
                print(f"error: stage {stage} failed with exit code {code}; its output is above", file=sys.stderr)
                return code
        return 0

    def begin(self) -> None:
        """Continue an interrupted quick start of the same arguments; otherwise start again."""
        note, wanted = self.root / "arguments.json", json.dumps([self.ranks, *self.overrides])
        self.resume = note.is_file() and note.read_text() == wanted and not (self.root / "summary.json").exists()
        if self.resume:
            self.say("continuing the interrupted quick start")
            return
        used = [stage for stage in STAGES if (self.root / stage).exists()]
        if used and not note.is_file():
            raise ConfigError(
                "run.dir", str(self.root), "a new folder, or one of an earlier quick start", f"It has {used}."
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / "summary.json").unlink(missing_ok=True)
            for stage in STAGES:  # made by this tool: a quick start keeps one run per stage, no history
                shutil.rmtree(self.root / stage, ignore_errors=True)
            note.write_text(wanted)
        except OSError as error:
            raise ConfigError("run.dir", str(self.root), "a folder that can be written", str(error)) from error

    def arguments(self, stage: str) -> list[str]:
        """Return the stage's overrides: its experiment, its folders below the root, then the user's."""
        here, there = str(self.root), "runs/quickstart"
        moved = []
        if here != there:
            plain = compose([f"experiment=quickstart_{stage}"])
            paths = {
                "run.dir": plain.run.dir,
                "model.init": plain.model.init,
                "model.tokenizer": plain.model.tokenizer,
                "data.train": plain.data.train,
                "data.eval": plain.data.eval,
                "reward.model": plain.reward.model,
            }
            moved = [f"{key}={quoted(p.replace(there, here, 1))}" for key, p in paths.items() if p.startswith(there)]
        return [f"experiment=quickstart_{stage}", *moved, *self.overrides]

    def stage(self, stage: str, cfg: Config) -> int:
        """Run a stage like `aligner launch`."""
        self.say(f"{stage}: {self.root / stage} (metrics.jsonl, checkpoints, hf)")
        command = ["launch", "--ranks", str(self.ranks), *self.arguments(stage)]
        return launch_run(cfg, self.ranks, lambda: freeze_start(cfg), command)

    def timed(self, stage: str, work) -> Any:
        start = time.perf_counter()
        result = work()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        return result

    def cpu_seconds(self) -> float:
        return round(_cpu_seconds() - self.before_s, 1)

    def say(self, text: str) -> None:
        print(f"\n== {text}", flush=True)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and all processes that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def make_data(root: Path, seed: int) -> None:
    """Write data/{train,valid,test}.jsonl and tokenizer/ for the seed; a question is in exactly one of the files."""
    from aligner.data.tokenizer import train_tokenizer
    from examples.gym_tasks import split, write_jsonl
    from examples.sums import questions

    parts = split(questions(QUESTIONS, seed), SPLITS)
    for name, rows in parts.items():
        write_jsonl([row | {"completion": row["answer"]} for row in rows], str(root / "data" / f"{name}.jsonl"))
    texts = [row["prompt"] + row["answer"] for row in parts["train"]]
    # plain prompts, no conversations: without a chat template `aligner chat` asks as the model was trained
    options = {"split_digits": True, "split_words": False, "chat_template": None}
    train_tokenizer(texts, str(root / "tokenizer"), VOCABULARY, **options)


def write_pairs(root: Path, cfg: Config) -> None:
    from aligner.tools.generate import Answerer
    from examples.gym_tasks import write_jsonl
    from examples.pairs import make_pairs

    model = Answerer.load(root / "sft" / "hf", cfg.engine, cfg.model.dtype)
    for name in ("train", "test"):
        rows = read_jsonl(root / "data" / f"{name}.jsonl")
        pairs = make_pairs(model, rows, 6, cfg.seed)
        write_jsonl(pairs, str(root / "data" / f"pairs_{name}.jsonl"))


def accuracies(root: Path, configs: list[Config]) -> list[float]:
    """Measure accuracy with greedy decoding on all test prompts."""
    from aligner.tools.evaluate import evaluate

    for cfg in configs:
        cfg.data.eval, cfg.eval.prompts, cfg.logging.samples_shown = str(root / "data" / "test.jsonl"), 0, 0
    return [evaluate(cfg)["eval/accuracy"] for cfg in configs]


def summarize(
    root: Path, configs: dict[str, Config], accuracy: list[float], seconds: dict[str, float], ranks: int, cpu_s: float
) -> dict[str, Any]:
    """Write summary.json with the `accuracy` of each policy, and the reward model's pair accuracy."""
    summary: dict[str, Any] = {stage: {"accuracy": value} for stage, value in zip(POLICIES, accuracy, strict=True)}
    records = {stage: read_jsonl(root / stage / "metrics.jsonl") for stage in STAGES}
    summary["sft"]["steps"] = records["sft"][-1]["step"]
    summary["sft"]["stopped_early"] = records["sft"][-1]["step"] < configs["sft"].run.steps
    summary["rm"] = {"pair_accuracy": last(records["rm"], "eval/accuracy")}
    # the reward model's score of the policy it trained, on validation prompts, and the accuracy there
    summary["ppo"]["model_right"] = last(records["ppo"], "eval/model_right")
    summary["ppo"]["model_score"] = last(records["ppo"], "eval/model_score")
    summary["ppo"]["valid_accuracy"] = last(records["ppo"], "eval/accuracy")
    summary["ppo"]["model_gap"] = summary["ppo"]["model_right"] - summary["ppo"]["valid_accuracy"]
    summary["seconds"] = {stage: round(seconds[stage], 1) for stage in STAGES}
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    # an upper bound of what ran at the same time: this process and one child, or a stage's ranks, as large as its first
    rank = max(last(records[stage], "memory/peak_rss_bytes") for stage in STAGES)
    summary["peak_rss_bytes"] = peak_rss_bytes() + max(child, int(ranks * rank))
    summary["ranks"] = ranks
    summary["cpu_seconds"] = cpu_s
    summary["seed"] = configs["sft"].seed
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def last(records: list[dict[str, Any]], name: str) -> float:
    return next(record[name] for record in reversed(records) if record.get(name) is not None)


def show(summary: dict[str, Any], total_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    sft, seconds = summary["sft"]["accuracy"], summary["seconds"]
    table = Table("stage", "held-out result", "gain over SFT", "seconds", title=f"quick start, seed {summary['seed']}")
    note = (
        f"stopped early on purpose, step {summary['sft']['steps']}"
        if summary["sft"]["stopped_early"]
        else "ran to the end"
    )
    results = {stage: f"{summary[stage]['accuracy']:.3f} of answers right" for stage in POLICIES}
    results["rm"] = f"{summary['rm']['pair_accuracy']:.3f} of pairs in order"
    notes = {"sft": note, "rm_init": "initial weights of the reward model", "rm": ""}
    notes |= {stage: f"{summary[stage]['accuracy'] - sft:+.3f}" for stage in ("grpo", "ppo")}
    for stage in STAGES:
        table.add_row(stage, results[stage], notes[stage], f"{seconds[stage]:.0f}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    ppo = summary["ppo"]
    console.print(
        f"PPO saw only the reward model, which finds {ppo['model_right']:.3f} of its answers right; "
        f"{ppo['valid_accuracy']:.3f} are (gap {ppo['model_gap']:+.3f}).\n"
        f"{total_s:.0f} s, {summary['cpu_seconds']:.0f} CPU s, {summary['peak_rss_bytes'] / 2**30:.1f} GiB at most "
        "of memory. SFT was stopped early so that there is room to improve: this is no claim that RL beats more SFT."
    )


if __name__ == "__main__":
    with quiet_pipe():
        sys.exit(main())
