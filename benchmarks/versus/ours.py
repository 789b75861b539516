"""aligner's side: the stages as `python -m aligner run` runs them, stopped at every step boundary.

Started by `benchmarks.versus_trl`, with the path of a WORK.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from aligner.cluster.threads import use
from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import engine as native
from aligner.engines.native.batch import COUNT, ROW
from aligner.engines.native.load import engine_from_folder
from aligner.types import SamplingParams
from benchmarks.versus.gate import Gate, Over
from benchmarks.versus.workload import EOS, PAD, Work, force_lengths, response_lengths

REWARD = Path(__file__).with_name("workload.py")


def force(work: Work) -> None:
    """Force the native engine's responses to the lengths of `response_lengths`."""
    calls = iter(range(1 << 30))

    class Forced(native.Batch):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self._forced = torch.tensor(response_lengths(work, next(calls)))

        def sample(self, logits: torch.Tensor, sampling: SamplingParams) -> None:
            row, count = self.state[ROW, : self.active], self.state[COUNT, : self.active]
            super().sample(force_lengths(logits, count + 1 >= self._forced[row]), sampling)

    native.Batch = Forced


def overrides(work: Work) -> list[str]:
    folder = Path(work.folder)
    lines = [
        f"stage={work.stage}",
        f"model.init={folder}/model",
        f"model.dtype={work.dtype}",
        f"data.train={folder}/rows.jsonl",
        f"run.dir={folder}/ours",
        "run.resume=never",
        "run.steps=1000000",
        "run.samples_every=0",
        "run.export=false",
        "checkpoint.final=false",
        "logging=quiet",
        "optim.lr=1e-6",
        f"cluster.threads={work.threads}",
        f"batch.micro_batch_samples={work.micro_batch}",
        f"batch.sequences={work.sequences}",
        "data.max_prompt_tokens=512",
    ]
    if work.stage in ("grpo", "ppo"):
        lines += [f"sampling.max_response_tokens={work.max_response}"]
    if work.stage == "grpo":
        lines += [f"batch.prompts={work.samples // work.group}", f"batch.group={work.group}"]
        lines += [f"reward.functions=[{{path: '{REWARD}:rewarded'}}]", "algorithm.kl.coef=0"]
    if work.stage == "ppo":
        lines += [f"batch.prompts={work.samples}", "batch.group=1", f"batch.epochs={work.epochs}"]
        lines += [f"batch.minibatch_samples={work.samples}", f"reward.model={folder}/reward", "algorithm.kl.coef=0.05"]
        lines += ["critic.warmup_steps=0"]
    return lines


def train(work: Work, gate: Gate) -> None:
    # not before: what generates alone needs none of them, nor their memory
    from aligner.builders.stage import run_stage
    from aligner.cluster.env import RankEnv
    from aligner.config.resolve import compose
    from aligner.config.validate import validate
    from aligner.run.loop import Run
    from aligner.run.stop import Boundary

    settle, finish, fields = Boundary.settle, Run.finish, {}

    def counted(
        self: Run, step: int, metrics: dict, samples: Sequence = (), tokens: float = 0.0, rows: int = 0
    ) -> None:
        fields["tokens"] = tokens
        finish(self, step, metrics, samples, tokens, rows)

    def gated(self: Boundary, writing: bool) -> tuple[str, bool]:
        gate(**(fields if work.stage == "sft" else {}))
        return settle(self, writing)

    Boundary.settle, Run.finish = gated, counted  # type: ignore[method-assign]
    if work.stage in ("grpo", "ppo"):
        force(work)
    (Path(work.folder) / "ours").mkdir(exist_ok=True)
    cfg = compose(overrides(work))
    validate(cfg, 1)
    run_stage(cfg, RankEnv())


def generate(work: Work, gate: Gate) -> None:
    force(work)
    rows = [line.split('"')[3] for line in (Path(work.folder) / "rows.jsonl").read_text().splitlines()]
    dtype = getattr(torch, work.dtype)
    engine = engine_from_folder(Path(work.folder) / "model", EngineConfig(), device="cpu", dtype=dtype, pad_id=PAD)
    sampling = SamplingParams(max_response_tokens=work.max_response, stop_token_ids=(EOS,))
    prompts, at = work.samples // work.group, 0
    while True:
        gate()
        ids = [[int(word[1:]) for word in rows[(at + i) % len(rows)].split()] for i in range(prompts)]
        engine.generate(ids, [[at * work.group + i for i in range(work.group)] for _ in ids], sampling)
        at += prompts


def main() -> None:
    work = Work.read(Path(sys.argv[1]))
    gate = Gate(work.threads)
    use(work.threads, 1)
    try:
        (generate if work.stage == "generate" else train)(work, gate)
    except Over:
        return
