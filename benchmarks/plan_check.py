"""The calculator of `aligner plan` against published step times, settings as published; errors as they are.

    python -m benchmarks.plan_check [--json FILE]

What a source does not say is a guess, marked in `guessed`. None of these systems is this project: their engines and
overlaps differ, and the calculator is given what they are known to do (CUDA graphs, refilled batches, engine layout).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from aligner.config.resolve import compose
from aligner.config.schema import ModelConfig
from aligner.plan.devices import DEVICES
from aligner.plan.job import Engine, Job, Part, Rows
from aligner.plan.prediction import predict
from aligner.plan.shapes import Grid

GRAPHS = {"launches": False, "padded": False, "resident": False, "kv_bytes": 30e9}


@dataclass(frozen=True)
class Published:
    name: str
    source: str
    step_s: float
    job: Job
    guessed: str
    tokens_per_gpu_s: float = 0.0


def shape(name: str, *overrides: str) -> ModelConfig:
    return compose([f"model={name}", *overrides]).model


def nemo_rl(model: ModelConfig, prompt: float, response: float, grid: Grid, engine: Engine, **changes) -> Job:
    """2,048 samples of 64 prompts, 4 optimizer steps, rows packed to the longest of 4,096 tokens, no reference."""
    rows = Rows(2048, 64, prompt, 512, response, 4096 - 512)
    job = Job(
        "grpo",
        (Part("policy", model, trained=True),),
        grid,
        rows,
        engine,
        minibatches=4,
        micro_tokens=4096,
        logprob_tokens=8192,
    )
    return replace(job, **changes)


def nemo_aligner(response: float, nodes: int, micro: int) -> Job:
    """The actor's nodes: 1,024 prompts, batches of `micro` that end before the next begins, 8 optimizer steps."""
    model = shape("llama3_70b")
    parts = (Part("policy", model, trained=True), Part("reference", model))
    engine = Engine(8, 2, micro, 30e9, refill=False, padded=False, launches=False, resident=False)
    rows = Rows(1024, 1024, 200, 1024, response, 1024)
    grid = Grid(8, 8, 1, 1, nodes // 8, sequence=True)
    return Job("ppo", parts, grid, rows, engine, minibatches=8, micro_rows=1, logprob_tokens=4096)


def published() -> list[Published]:
    rl = "NeMo-RL v0.5, docs/about/performance-summary.md and recipes, DGX H100, bfloat16, on-policy"
    aligner = "NeMo-Aligner, docs/user-guide/rlhf.rst, PPO with TensorRT-LLM, HelpSteer2 prompts"
    eight, small = shape("llama3_8b"), shape("qwen3_30b_a3b")
    large = shape(
        "qwen3_0.6b",
        *("model.num_layers=64", "model.hidden_size=5120", "model.ffn_hidden_size=25600", "model.num_heads=64"),
        "model.tie_embeddings=false",
    )
    # prompts: published tokens/s/GPU x GPUs x seconds / samples, less the published mean response
    found = [
        Published(
            "8B GRPO, 16 GPUs",
            rl,
            92.8,
            nemo_rl(eight, 127, 1019, Grid(pipeline=2, data=8), Engine(max_batch=256, **GRAPHS), recompute=True),
            "longest prompt",
            1581,
        ),
        Published(
            "32B GRPO, 32 GPUs",
            rl,
            376,
            nemo_rl(large, 103, 3251, Grid(4, 4, data=2, sequence=True), Engine(4, max_batch=256, **GRAPHS)),
            "longest prompt",
            571,
        ),
        Published(
            "30B-A3B GRPO, 32 GPUs",
            rl,
            198,
            nemo_rl(small, 102, 3196, Grid(expert=8, data=32), Engine(2, max_batch=256, **GRAPHS)),
            "longest prompt",
            1066,
        ),
    ]
    for nodes, response, step_s, micro in ((8, 350.7, 366.7, 8), (16, 323.3, 190.4, 8), (32, 331.7, 108.0, 8)):
        found.append(
            Published(
                f"70B PPO, {nodes * 3 // 2} nodes",
                aligner,
                step_s,
                nemo_aligner(response, nodes, micro),
                "tp8 pp8, prompts of 200 tokens, responses up to 1,024, critic's nodes never the slower",
            )
        )
    last = nemo_aligner(334, 64, 16)
    found.append(Published("70B PPO, 96 nodes", aligner, 56.9, last, found[-1].guessed))
    return found


def compare(case: Published) -> dict:
    prediction = predict(case.job, DEVICES["h100"])
    return {
        "case": case.name,
        "source": case.source,
        "guessed": case.guessed,
        "gpus": case.job.grid.gpus,
        "published_s": case.step_s,
        "predicted_s": prediction.step_s,
        "error": prediction.step_s / case.step_s - 1,
        "published_tokens_per_gpu_s": case.tokens_per_gpu_s,
        "predicted_tokens_per_gpu_s": prediction.tokens_per_gpu_s,
        "phases_s": {name: phase.seconds for name, phase in prediction.phases.items()},
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = [compare(case) for case in published()]
    print(f"{'case':<24}{'published s':>12}{'predicted s':>12}{'error':>8}   phases")
    for row in found:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases_s"].items())
        print(f"{row['case']:<24}{row['published_s']:12.1f}{row['predicted_s']:12.1f}{row['error']:8.0%}   {phases}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
