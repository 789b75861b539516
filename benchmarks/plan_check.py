"""The calculator of `aligner plan` against published step times, settings as published; errors as they are.

    python -m benchmarks.plan_check [--here] [--json FILE]

Settings that a source does not give are guesses, marked in `guessed`. None of these systems is this project: their
engines and overlaps differ. The calculator gets their known settings (CUDA graphs, refilled batches, engine layout).

--here: a GRPO step of this project on one rank of this machine, against the formulas with the matrix-product and copy
rates measured between its steps. Rates are then those that can be reached, so predictions are floors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from aligner.config.resolve import compose
from aligner.config.sections.model.config import ModelConfig
from aligner.plan.devices import DEVICES, Assumptions, Device
from aligner.plan.job import Engine, PlanJob, PlannedModel, PlannedRows
from aligner.plan.prediction import predict
from aligner.plan.shapes import Grid
from aligner.plan.times import plan_times
from benchmarks.common import write_json

GRAPHS = {"launches": False, "padded": False, "placed": False, "resident": False, "kv_bytes": 30e9}


@dataclass(frozen=True)
class Published:
    name: str
    source: str
    step_s: float
    job: PlanJob
    guessed: str
    tokens_per_gpu_s: float = 0.0


def shape(name: str, *overrides: str) -> ModelConfig:
    return compose([f"model={name}", *overrides]).model


def nemo_rl(model: ModelConfig, prompt: float, response: float, grid: Grid, engine: Engine, **changes) -> PlanJob:
    """Return a job of 2,048 samples of 64 prompts, 4 optimizer steps, rows packed to the longest of 4,096 tokens, no
    reference."""
    rows = PlannedRows(2048, 64, prompt, 512, response, 4096 - 512)
    job = PlanJob(
        "grpo",
        (PlannedModel("policy", model, trained=True),),
        grid,
        rows,
        engine,
        minibatches=4,
        micro_tokens=4096,
        logprob_tokens=8192,
    )
    return replace(job, **changes)


def nemo_aligner(response: float, nodes: int, micro: int) -> PlanJob:
    """Return the job of the actor's nodes: 1,024 prompts, batches of `micro` that end before the next begins, 8
    optimizer steps."""
    model = shape("llama3_70b")
    parts = (PlannedModel("policy", model, trained=True), PlannedModel("reference", model))
    engine = Engine(8, 2, micro, 30e9, refill=False, padded=False, launches=False, placed=False, resident=False)
    rows = PlannedRows(1024, 1024, 200, 1024, response, 1024)
    grid = Grid(8, 8, 1, 1, nodes // 8, sequence=True)
    return PlanJob("ppo", parts, grid, rows, engine, minibatches=8, micro_rows=1, logprob_tokens=4096)


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
    cases = [
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
        cases.append(
            Published(
                f"70B PPO, {nodes * 3 // 2} nodes",
                aligner,
                step_s,
                nemo_aligner(response, nodes, micro),
                "tp8 pp8, prompts of 200 tokens, responses up to 1,024, critic's nodes never the slower",
            )
        )
    last = nemo_aligner(334, 64, 16)
    cases.append(Published("70B PPO, 96 nodes", aligner, 56.9, last, cases[-1].guessed))
    return cases


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


HERE = ModelConfig(
    num_layers=4, hidden_size=384, ffn_hidden_size=1152, num_heads=6, num_kv_heads=2, vocab_size=4096, max_position=512
)


def here(rounds: int = 5) -> list[dict]:
    """Measure each phase's seconds over the formula's, with rates measured right after it; medians over rounds. One
    thread."""
    import torch

    from aligner.cluster.env import RankEnv
    from aligner.megatron.groups import init_distributed
    from aligner.shakedown.rates import Copy, Products, seconds
    from benchmarks import gpu
    from benchmarks.gpu_bench import Bench

    torch.set_num_threads(1)
    size = gpu.Size(4, 4, 64, 32, batches=(16,), micro_tokens=(768,), kv_bytes=1 << 26)
    machine = gpu.Machine(init_distributed(RankEnv(), "gloo", 60.0), "CPU", None, 1.0, 1.0)
    bench = Bench(HERE, size, size.micro_tokens[0], machine, torch.float32)
    job = gpu.job_for(HERE, size, size.micro_tokens[0], 4)
    best = Assumptions(matrix=1, experts=1, memory_bandwidth=1, link=1, message_s=0, layer_s=0)
    products, copies = Products([(768, 1152, 384)] * 20, torch.float32, machine.device), Copy(1 << 29, machine.device)

    def rates() -> tuple[float, float]:
        return products.operations / seconds(products, machine.device), copies.moved / seconds(copies, machine.device)

    measured: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        report = gpu.Report()
        before = rates()
        gpu.measure_grpo(bench, report)
        matrix, copy = ((a + b) / 2 for a, b in zip(before, rates(), strict=True))
        times = plan_times(job, Device("here", matrix, 1e12, copy, 1.0, 1.0), best)
        if number:  # the first one makes buffers
            for name, phase in times.items():
                measured.setdefault(name, []).append((report.figures[f"grpo.{name}_s"], phase.seconds))
    return [
        {
            "phase": name,
            "measured_s": statistics.median(a for a, _ in pairs),
            "predicted_s": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
        }
        for name, pairs in measured.items()
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="against this machine instead")
    options = parser.parse_args(arguments)
    if options.here:
        rows = here()
        print(f"{'phase':<12}{'measured s':>12}{'formula s':>12}{'measured over formula':>24}")
        for row in rows:
            print(f"{row['phase']:<12}{row['measured_s']:12.3f}{row['predicted_s']:12.3f}{row['ratio']:24.2f}")
        write_json(options.json, {"rows": rows})
        return 0
    compared = [compare(case) for case in published()]
    print(f"{'case':<24}{'published s':>12}{'predicted s':>12}{'error':>8}   phases")
    for row in compared:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases_s"].items())
        print(f"{row['case']:<24}{row['published_s']:12.1f}{row['predicted_s']:12.1f}{row['error']:8.0%}   {phases}")
    write_json(options.json, {"rows": compared})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
