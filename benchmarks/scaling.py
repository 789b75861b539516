"""Costs of tensor, pipeline, context and data parallelism: CPU seconds of all ranks over those of one rank, and bytes.

    python -m benchmarks.scaling [--rounds 5] [--json FILE]

The same minibatch, trained on 1, 2 and 4 gloo ranks of this machine in turns; a ratio of 1 means that splitting the
work cost nothing. CPU seconds, so that neither too few cores nor neighbours count as overhead; the rest is work
done twice (replicated parts, smaller products) and gloo's copies. Bytes are those that a rank hands to collectives in
one step, measured and by the formulas of `aligner plan`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.plan.job import PlanJob, PlannedModel, PlannedRows
from aligner.plan.shapes import Grid
from aligner.plan.traffic import pass_calls, step_calls

SHAPE = ModelConfig(
    num_layers=4, hidden_size=256, ffn_hidden_size=768, num_heads=8, num_kv_heads=4, vocab_size=2048, max_position=512
)
ROWS, WIDTH, MICRO = 16, 64, 4
CASES = {
    "one rank": (ParallelConfig(), 1),
    "dp2": (ParallelConfig(), 2),
    "tp2": (ParallelConfig(tensor=2), 2),
    "tp2, sequence": (ParallelConfig(tensor=2, sequence=True), 2),
    "pp2": (ParallelConfig(pipeline=2), 2),
    "cp2": (ParallelConfig(context=2), 2),
    "cp2 over heads": (ParallelConfig(context=2, context_mode="alltoall"), 2),
    "dp4": (ParallelConfig(), 4),
    "tp2 dp2": (ParallelConfig(tensor=2, sequence=True), 4),
    "tp2 pp2": (ParallelConfig(tensor=2, pipeline=2, sequence=True), 4),
    "tp4": (ParallelConfig(tensor=4, sequence=True), 4),
}


def measure(parallel: ParallelConfig, steps: int = 2) -> dict:
    """Return the least CPU and wall seconds of one rank's step after a warm one, and the bytes of its collectives."""
    import torch

    from aligner.config.sections.batch import BatchConfig
    from aligner.config.sections.optim import OptimConfig
    from aligner.megatron.groups import build_layout
    from aligner.megatron.model import Head
    from aligner.megatron.train import ShardedModel
    from aligner.megatron.weights import random_source
    from aligner.roles.policy import Policy
    from aligner.stages.sft import sft_loss
    from aligner.types import TrainBatch
    from tests.operations import Listener

    layout, device = build_layout(parallel), torch.device("cpu")
    source, optim = random_source(SHAPE, 0), OptimConfig(lr=1e-4)
    model = ShardedModel(SHAPE, layout, Head(), torch.float32, device, source, optim, 100)
    policy = Policy(model, BatchConfig(micro_batch_samples=MICRO))
    tokens = torch.randint(1, SHAPE.vocab_size, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(ROWS, WIDTH)
    mask[:, 0] = 0
    full = TrainBatch(tokens, torch.full((ROWS,), WIDTH), mask)
    own_rows = full.select(torch.arange(ROWS).chunk(layout.data)[layout.dp_rank])
    with Listener() as heard:
        policy.update(own_rows, sft_loss(own_rows, layout.pgs.dp))
    cpu, wall = [], []
    for _ in range(steps):
        torch.distributed.barrier()
        start = time.process_time(), time.perf_counter()
        policy.update(own_rows, sft_loss(own_rows, layout.pgs.dp))
        cpu.append(time.process_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return {"cpu_s": min(cpu), "wall_s": min(wall), "bytes": sum(heard.bytes.values()), "stage": layout.pp_rank}


def formula_bytes(parallel: ParallelConfig, world: int, stage: int) -> float:
    p = parallel
    over_heads = p.context_mode == "alltoall"
    grid = Grid(p.tensor, p.pipeline, p.context, p.expert, world // p.model_size, p.sequence, over_heads)
    model = PlannedModel("policy", SHAPE, trained=True)
    rows = PlannedRows(ROWS, ROWS, 1, 1, WIDTH - 1, WIDTH - 1)  # the loss is of every token but the first
    job = PlanJob("sft", (model,), grid, rows, None, element=4, micro_rows=MICRO)
    count, tokens = job.micro_batches()
    calls = pass_calls(job, model, stage, tokens, backward=True) * count + step_calls(job, model, stage)
    return sum(call.size for call in calls)


def main(arguments: list[str]) -> int:
    from benchmarks.common import write_json
    from tests.ranks import Ranks

    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ranks = Ranks()
    by_case: dict[str, list[list[dict]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):  # in turns
        for name, (parallel, world) in CASES.items():
            by_case[name].append(ranks.run("benchmarks.scaling:measure", world=world, parallel=parallel))
    ranks.close()
    rows = []
    for name, (parallel, world) in CASES.items():
        pairs = zip(by_case[name], by_case["one rank"], strict=True)
        ratios = [sum(r["cpu_s"] for r in ours) / one[0]["cpu_s"] for ours, one in pairs]
        rank = max(by_case[name][0], key=lambda r: r["bytes"])
        wanted = formula_bytes(parallel, world, rank["stage"])
        rows.append(
            {
                "case": name,
                "ranks": world,
                "cpu_ratio": statistics.median(ratios),
                "cpu_s": statistics.median(sum(r["cpu_s"] for r in ours) for ours in by_case[name]),
                "wall_s": statistics.median(max(r["wall_s"] for r in ours) for ours in by_case[name]),
                "bytes": rank["bytes"],
                "formula_bytes": wanted,
            }
        )
    print(f"{'layout':<16}{'CPU s':>8}{'over one rank':>15}{'wall s':>8}{'MiB a rank':>12}{'formula':>9}{'error':>8}")
    for row in rows:
        error = f"{row['formula_bytes'] / row['bytes'] - 1:8.1%}" if row["bytes"] else ""
        print(
            f"{row['case']:<16}{row['cpu_s']:8.3f}{row['cpu_ratio']:15.2f}{row['wall_s']:8.3f}"
            f"{row['bytes'] / 2**20:12.2f}{row['formula_bytes'] / 2**20:9.2f}{error}"
        )
    write_json(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
