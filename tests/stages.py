"""Whole stages at toy size, in this process on one rank: data, configs, and what a run leaves behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from aligner.config.schema import Config
from aligner.loading import for_good
from aligner.run.metrics import read_jsonl
from aligner.shakedown.toy import ToyData

ROOT = Path(__file__).resolve().parent.parent
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"
BASE = [
    "logging=quiet",
    "cluster.threads=1",
    "run.deterministic=true",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.num_kv_heads=2",
    "model.max_position=64",
    "model.dtype=float32",
    "?data.max_tokens=32",
    "?data.max_prompt_tokens=16",
    "?optim.lr=3e-3",  # which `sample` does not read
]
STAGES: dict[str, list[str]] = {
    "sft": ["batch.sequences=16", "batch.micro_batch_samples=8"],
    "rm": ["batch.sequences=8", "batch.micro_batch_samples=4"],
    "dpo": ["batch.sequences=8", "batch.micro_batch_samples=4", "algorithm.preference.beta=0.5"],
    "kto": ["batch.sequences=8", "batch.micro_batch_samples=4", "algorithm.kto.beta=0.5"],
    "distill": ["batch.sequences=16", "batch.micro_batch_samples=8", "sampling.max_response_tokens=4"],
    "online_dpo": [
        "batch.prompts=8",
        "batch.group=4",
        "batch.micro_batch_samples=4",
        "sampling.max_response_tokens=4",
        "algorithm.preference.beta=0.5",
        "reward.functions=[{path: tests/assets/tiny_rewards.py:vowels}]",
    ],
    "grpo": [
        "batch.prompts=8",
        "batch.group=4",
        "batch.micro_batch_samples=16",
        "sampling.max_response_tokens=4",
        "reward.functions=[{path: tests/assets/tiny_rewards.py:vowels}]",
    ],
    "ppo": [
        "batch.prompts=16",
        "batch.group=1",
        "batch.minibatch_samples=8",
        "batch.micro_batch_samples=4",
        "sampling.max_response_tokens=4",
        "critic.warmup_steps=1",
        "critic.optim.lr=3e-3",
        "eval.functions=[{path: tests/assets/tiny_rewards.py:vowels}]",
    ],
}


SAMPLE = [  # no training: what it leaves behind is its files
    "batch.prompts=12",
    "batch.group=4",
    "sampling.max_response_tokens=4",
    "reward.functions=[{path: tests/assets/tiny_rewards.py:vowels}]",
]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_data(root: Path) -> Path:
    """A byte tokenizer, and the task "say the letter again": answers, pairs with margins, the answers of these with
    labels, and scored answers."""
    ToyData(root).make()
    rows = read_jsonl(root / "train.jsonl")
    write_jsonl(root / "eval.jsonl", rows[:8])
    scored = [r | {"good": float(i % 2), "short": i % 3 - 1.0, "completion": "yn"[i % 2]} for i, r in enumerate(rows)]
    write_jsonl(root / "scored.jsonl", scored)
    return root


# runs of stage grpo on `make_dice`, whose environment never answers the same
DICE = ["environment.path=tests/assets/environments.py:Dice", "environment.max_turns=3", "environment.max_tokens=40"]
DICE += ["sampling.max_response_tokens=6", "batch.prompts=4", "batch.group=8", "optim.lr=3e-4"]
ROLL = {"type": "function", "function": {"name": "roll", "description": "Rolls the dice.", "parameters": {}}}


def make_dice(root: Path, trained: bool = True) -> Path:
    """A model that rolls dice, by a call, and says a letter; with its tokenizer, sft.jsonl and train.jsonl. Not
    `trained`: without the model."""
    from aligner.data.tokenizer import train_tokenizer
    from aligner.data.tool_calls import written
    from examples.calculator import TEMPLATE

    texts = [written("hermes", "roll", {}), "roll"] * 9
    train_tokenizer(texts, str(root / "tokenizer"), 330, split_words=False, chat_template=TEMPLATE)
    function = {"name": "roll", "arguments": {}}
    rolls = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    chats = [
        [
            {"role": "user", "content": f"say {c}"},
            *[rolls, {"role": "tool", "content": str(1 + i % 6)}],
            {"role": "assistant", "content": c},
        ]
        for i, c in enumerate(LETTERS[:8])
    ]
    write_jsonl(root / "sft.jsonl", [{"messages": chat, "tools": [ROLL]} for chat in chats])
    write_jsonl(root / "train.jsonl", [{"prompt": f"say {c}"} for c in LETTERS[:8]])
    if trained:
        stage("sft", root, root / "sft", f"data.train={root / 'sft.jsonl'}", "run.steps=60")
    return root


# the quick start's stages without what its task made small does not need
SUMS = ["logging=quiet", "cluster.threads=1", "run.eval_every=0", "run.samples_every=0", "checkpoint.final=false"]
SUMS += ["data.eval=''", "optim.schedule=constant"]


def make_sums(root: Path, tens: str) -> Path:
    """The quick start's tokenizer; of its questions, in train.jsonl and test.jsonl, the sums of numbers with such tens,
    and 32 of them in few.jsonl."""
    from examples.quickstart import make_data

    make_data(root, seed=0)
    small = re.compile(rf"({tens}\d) \+ ({tens}\d) =")
    for name in ("test", "train"):
        lines = (root / "data" / f"{name}.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if small.search(row["prompt"])]
        write_jsonl(root / f"{name}.jsonl", rows)
    write_jsonl(root / "few.jsonl", rows[:32])
    return root


def sums_model(root: Path, *overrides: str) -> None:
    """`sft` beside these questions, trained on them."""
    settings = ["experiment=quickstart_sft", *SUMS, f"model.tokenizer={root / 'tokenizer'}", "run.stop.metric=''"]
    settings += ["optim.betas=[0.9,0.95]", "optim.warmup_steps=50"]  # of which these few steps are enough
    run([*settings, f"run.dir={root / 'sft'}", f"data.train={root / 'train.jsonl'}", *overrides])


def overrides(stage: str, data: Path, run_dir: Path, *settings: str) -> list[str]:
    """The command line of a toy run; reward models and starting points are the caller's to name."""
    train = data / {"rm": "pairs.jsonl", "dpo": "pairs.jsonl", "kto": "labels.jsonl"}.get(stage, "train.jsonl")
    own = [f"stage={stage}", f"run.dir={run_dir}", f"data.train={train}", f"model.tokenizer={data / 'tokenizer'}"]
    return [*own, *BASE, *(SAMPLE if stage == "sample" else STAGES[stage]), *settings]


@cache
def settle() -> None:
    """A run ends with a full collection of garbage, which takes as long as all else of a toy run: it need not look at
    the modules, which are those that it would import as it goes as well."""
    from aligner.config.resolve import compose

    with for_good():
        import torch._dynamo  # noqa: F401 (by its first checkpoint)
        import transformers  # noqa: F401

        import aligner.builders.stage  # noqa: F401

        for name in STAGES:
            import_module(f"aligner.stages.{name}")
            compose([f"stage={name}"])


def run(arguments: list[str]) -> Path:
    """What `aligner run` does, without its printing and its exit code: errors are raised. Returns the run folder."""
    from aligner.config.resolve import compose
    from aligner.config.validate import validate

    settle()
    cfg: Config = compose(arguments)
    validate(cfg, 1)
    return execute(cfg)


def execute(cfg: Config) -> Path:
    from aligner.builders.stage import run_stage
    from aligner.cluster.env import RankEnv
    from aligner.config.freeze import freeze

    freeze(cfg, cfg.run.dir)
    try:
        assert run_stage(cfg, RankEnv()) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    return Path(cfg.run.dir)


def stage(name: str, data: Path, run_dir: Path, *more: str) -> Path:
    return run(overrides(name, data, run_dir, *more))


class PowerCut(Exception):
    """A process ends here, as tests play it."""


@contextmanager
def power_cut_at_answer(number: int) -> Iterator[None]:
    """Within, the `number`-th write to the log of outside answers raises PowerCut, and so does each later one to that
    log: threads may end after the run."""
    from aligner.answers import AnswerLog

    write, left = AnswerLog.write, [number]

    def dead(*answer):
        raise PowerCut

    def cut(self, *answer):
        left[0] -= 1
        if left[0] > 0:
            return write(self, *answer)
        self.write = dead
        raise PowerCut

    with patch.object(AnswerLog, "write", cut):
        yield


@contextmanager
def power_cut_in_update(step: int) -> Iterator[None]:
    """Within, the first update of `step` raises PowerCut."""
    from aligner.roles.policy import Policy
    from aligner.rollout.source import RolloutSource

    now, update, take = [0], Policy.update, RolloutSource.next

    def counted(self, number):
        now[0] = number
        return take(self, number)

    def cut(self, *args, **kwargs):
        if now[0] == step:
            raise PowerCut
        return update(self, *args, **kwargs)

    with patch.object(RolloutSource, "next", counted), patch.object(Policy, "update", cut):
        yield


def records(run_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(run_dir / "metrics.jsonl")


# what a clock or the operating system says; a fresh process also copies weights that the one before it still held
# and what an engine did for a rollout: a start that finds it stored does not generate it
TIMES = ("engine/", "time/", "throughput/", "memory/", "wall_time")
TIMES += ("refit/seconds", "refit/gb_per_s", "refit/bytes", "refit/wire")


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    """The records without `TIMES`."""
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in records(run_dir)]


def differences(a: Path, b: Path) -> list[tuple]:
    """(step, metric, value in a, value in b) of all that differs between two runs' records."""
    left, right = timeless(a), timeless(b)
    if [r["step"] for r in left] != [r["step"] for r in right]:
        return [("steps", [r["step"] for r in left], [r["step"] for r in right])]
    return [
        (x["step"], name, x.get(name), y.get(name))
        for x, y in zip(left, right, strict=True)
        for name in {**x, **y}
        if x.get(name) != y.get(name)
    ]


def weights(run_dir: Path, export: str = "hf") -> dict[str, torch.Tensor]:
    from aligner.models.safetensors_io import open_hf

    return dict(open_hf(run_dir / export))


def same_weights(a: Path, b: Path) -> bool:
    exports = [sorted(path.name for path in run.glob("hf*")) for run in (a, b)]
    if exports[0] != exports[1]:
        return False
    both = [(weights(a, name), weights(b, name)) for name in exports[0]]
    return all(x.keys() == y.keys() and all(torch.equal(t, y[name]) for name, t in x.items()) for x, y in both)


def checkpoints(run_dir: Path) -> list[int]:
    from aligner.megatron.checkpoint_files import complete_checkpoints

    return [step for step, _ in complete_checkpoints(run_dir / "checkpoints")]
