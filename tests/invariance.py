"""The product's promise as a table: one recorded rollout, replayed in every layout, gives the same numbers.

    python -m tests.invariance [--all] [--stages sft,grpo] [--json FILE]

One axis at a time and the eleven layouts of up to four ranks, the same for a model with experts; `--all`: the whole
product of layouts with micro-batch sizes, packing, recomputation and the distributed optimizer. Exits 1 if a deviation
is past its bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.tools.layouts.cases import CONTEXT_GRADIENT, TOLERANCES, LayoutCase, layouts, relative
from tests.invariance_muon import MuonCase

ROLLOUT = Path(__file__).parent / "assets" / "rollout.safetensors"
PLAIN = ("sft", "rm", "dpo", "dpo_by_rank", "kto", "distill", "distill_top_k", "grpo", "grpo_proxy", "ppo", "critic")
LOSSES = (  # of tests/invariance_losses.py: a policy loss, an advantage; the losses of pairs
    *("gspo+rloo", "cispo+opo", "sapo+gpg", "gmpo+pass_at_k", "dppo+dr_grpo", "gpg+reinforce_pp_baseline"),
    *("reinforce+gdpo", "clip_cov+reinforce_pp", "kl_cov+remax", "kl_abs", "ppo+gae", "own", "dpo_others"),
    *("dpo_sync", "sft_dft", "reinforce+maxrl", "vapo", "opsd", "sdpo", "distill_spans", "echo"),
)
STAGES = (*PLAIN, *LOSSES)
MODEL = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    qk_norm=True,
    max_position=128,
)
EXPERTS = replace(MODEL, family="qwen3_moe", moe=MoeConfig(4, top_k=2, ffn_hidden_size=24))
ADAPTED = replace(MODEL, lora=LoraConfig(rank=4, alpha=8, targets=[ALL_LINEAR]))
BALANCED = replace(EXPERTS, moe=replace(EXPERTS.moe, aux_coef=0.05))  # with the auxiliary loss of the minibatch
MEASURES = ("loss", "gradient", "adam")
# loss: |difference| / max(1, |loss|); gradient: worst tensor's ||difference|| / ||gradient||; adam: worst tensor's
# ||difference|| / ||update|| after two steps (Adam turns a gradient of the size of rounding into a full step)
BOUNDS = {"loss": TOLERANCES["loss"], "gradient": TOLERANCES["gradient"], "adam": 1e-3}
CONTEXT_BOUNDS = BOUNDS | {"gradient": CONTEXT_GRADIENT}
# against bfloat16 on one rank: 8 bits of mantissa, and sums in another order (seen: 6e-4, 2.3e-2, 0.16)
BFLOAT16_BOUNDS = {"loss": 5e-3, "gradient": 5e-2, "adam": 0.3}


def axes() -> dict[str, LayoutCase]:
    """Name -> a case that differs from one rank, packed, all rows at once, in one thing (or in its layout)."""
    cases = {name: LayoutCase(world, parallel) for name, (world, parallel) in layouts().items() if name != "one"}
    cases["tp2, sequence"] = LayoutCase(2, ParallelConfig(tensor=2, sequence=True))
    cases["cp2, over heads"] = LayoutCase(2, ParallelConfig(context=2, context_mode="alltoall"))
    for size in (1, 2, 4):
        cases[f"micro-batch {size}"] = LayoutCase(batch=BatchConfig(micro_batch_samples=size, share_prompts=False))
    cases["micro-batch by tokens"] = LayoutCase(batch=BatchConfig(micro_batch_tokens=60))
    cases["shared prompts"] = LayoutCase(batch=BatchConfig(micro_batch_samples=16))
    sharing, sequence = cases["shared prompts"].batch, cases["tp2, sequence"].parallel
    cases["shared prompts, tp2, sequence"] = LayoutCase(2, sequence, sharing)
    cases["padded"] = LayoutCase(batch=BatchConfig(micro_batch_samples=16, packing=False))
    cases["padded, cp2"] = replace(cases["padded"], world=2, parallel=ParallelConfig(context=2))
    cases["logits in parts"] = LayoutCase(batch=BatchConfig(micro_batch_samples=16, logits_bytes=1 << 15))
    cases["recompute"] = LayoutCase(recompute="full")
    cases["plain optimizer, dp2"] = LayoutCase(2, distributed=False)
    return cases | expert_axes() | lora_axes() | muon_axes()


def muon_axes() -> dict[str, LayoutCase]:
    """Cases of an update by Muon, against the same on one rank."""
    sequence = ParallelConfig(tensor=2, sequence=True)
    return {
        "muon, dp2": MuonCase(2),
        "muon, tp2, sequence": MuonCase(2, sequence),
        "muon, pp2, micro-batch 2": MuonCase(2, ParallelConfig(pipeline=2), BatchConfig(micro_batch_samples=2)),
        "muon, experts, ep2+tp2, sequence": MuonCase(4, replace(sequence, expert=2), model=EXPERTS),
    }


def lora_axes() -> dict[str, LayoutCase]:
    """Cases of models with adapters, against the same on one rank; a critic is on a policy's trunk. Compared are
    merged weights."""
    dora = replace(ADAPTED, lora=replace(ADAPTED.lora, dora=True))
    experts = replace(EXPERTS, lora=dora.lora)
    sequence = ParallelConfig(tensor=2, sequence=True)
    return {
        "lora, dp2": LayoutCase(2, model=ADAPTED),
        "lora, tp2": LayoutCase(2, ParallelConfig(tensor=2), model=ADAPTED),
        "lora, tp2, sequence": LayoutCase(2, sequence, model=ADAPTED),
        "lora, pp2, recompute": LayoutCase(2, ParallelConfig(pipeline=2), recompute="full", model=ADAPTED),
        "lora, cp2": LayoutCase(2, ParallelConfig(context=2), model=ADAPTED),
        "lora, shared prompts": LayoutCase(batch=BatchConfig(micro_batch_samples=16), model=ADAPTED),
        "lora, dora, tp2, sequence": LayoutCase(2, sequence, model=dora),
        "lora, dora, experts, ep2+tp2, sequence": LayoutCase(4, replace(sequence, expert=2), model=experts),
    }


def expert_axes() -> dict[str, LayoutCase]:
    """Cases of a model with experts, against the same model on one rank."""
    layouts = {
        "dp2": (2, ParallelConfig()),
        "tp2": (2, ParallelConfig(tensor=2)),
        "ep2": (2, ParallelConfig(expert=2)),
        "ep2+tp2": (2, ParallelConfig(expert=2, tensor=2)),
        "ep2+tp2, sequence": (4, ParallelConfig(expert=2, tensor=2, sequence=True)),
        "ep4+tp2, sequence": (4, ParallelConfig(expert=4, tensor=2, sequence=True)),
        "ep2+tp2+pp2, sequence": (4, ParallelConfig(expert=2, tensor=2, pipeline=2, sequence=True)),
        "ep2+pp2": (4, ParallelConfig(expert=2, pipeline=2)),
        "ep2+cp2": (2, ParallelConfig(expert=2, context=2)),
    }
    cases = {f"experts, {name}": LayoutCase(*layout, model=EXPERTS) for name, layout in layouts.items()}
    two = BatchConfig(micro_batch_samples=2)
    cases["experts, auxiliary loss, ep2, micro-batch 2"] = LayoutCase(*layouts["ep2"], batch=two, model=BALANCED)
    for name in ("ep2+tp2, sequence", "ep2+tp2+pp2, sequence", "ep2+pp2", "ep2+cp2"):
        cases[f"experts, replayed routing, {name}"] = replace(cases[f"experts, {name}"], replay=True)
    padded = BatchConfig(micro_batch_samples=2, packing=False)
    cases["experts, replayed routing, padded, micro-batch 2"] = LayoutCase(batch=padded, model=EXPERTS, replay=True)
    cases["experts, replayed routing, shared prompts"] = LayoutCase(
        batch=BatchConfig(micro_batch_samples=16), model=BALANCED, replay=True
    )
    return cases


def product() -> Iterator[tuple[str, LayoutCase]]:
    """Every combination."""
    for (name, (world, parallel)), sequence, size, packing, recompute, distributed in itertools.product(
        layouts().items(), (False, True), (1, 2, 4), (True, False), ("none", "full"), (True, False)
    ):
        if sequence and parallel.tensor == 1:
            continue
        batch = BatchConfig(micro_batch_samples=size, packing=packing)
        text = [name, *["sequence"] * sequence, f"micro {size}", *["padded"] * (not packing)]
        text += [*["recompute"] * (recompute == "full"), *["plain optimizer"] * (not distributed)]
        yield ", ".join(text), LayoutCase(world, replace(parallel, sequence=sequence), batch, recompute, distributed)


def deviation(got: dict, base: dict) -> dict[str, float]:
    """Measure -> deviation of one replay from another, as BOUNDS says."""
    import torch

    def worst(name: str, origin: dict | None = None) -> float:
        """Of the tensors; of all as one in bfloat16, where a small tensor's whole update is a few roundings."""
        triples = []
        for n, t in base[name].items():
            size = t.double() - origin[n].double() if origin else t.double()
            triples.append((got[name][n].double(), t.double(), size))
        if next(iter(base["start"].values())).dtype == torch.bfloat16:
            triples = [tuple(torch.cat([x.flatten() for x in side]) for side in zip(*triples, strict=True))]
        return max(relative(*triple) for triple in triples)

    return {
        "loss": abs(got["loss"] - base["loss"]) / max(1.0, abs(base["loss"])),
        "gradient": worst("gradient"),
        "adam": worst("adam", base["start"]),
    }


def bounds(case: LayoutCase) -> dict[str, float]:
    import torch

    if case.dtype == torch.bfloat16:
        return BFLOAT16_BOUNDS
    return CONTEXT_BOUNDS if case.parallel.context > 1 else BOUNDS


class Matrix:
    """Replays of the first `rows` samples through a pool of ranks; the base of each stage is computed once."""

    def __init__(self, ranks, rows: int = 32, rollout: Path = ROLLOUT, model: ModelConfig = MODEL):
        self.ranks, self.rows, self.rollout, self.model = ranks, rows, rollout, model
        self._base: dict = {}

    def replay(self, stage: str, case: LayoutCase, without: str = "") -> dict:
        target = "tests.invariance_jobs:replay"
        arguments = {"file": self.rollout, "stage": stage, "model": case.model or self.model, "count": self.rows}
        return self.ranks.run(target, world=case.world, case=case, without=without, **arguments)[0]

    def base(self, stage: str, case: LayoutCase) -> dict:
        key = type(case), stage, case.dtype, str(case.model), case.replay
        if key not in self._base:
            alone = replace(type(case)(), dtype=case.dtype, model=case.model, replay=case.replay)
            self._base[key] = self.replay(stage, alone)
        return self._base[key]

    def deviation(self, stage: str, case: LayoutCase) -> dict[str, float]:
        return deviation(self.replay(stage, case), self.base(stage, case))


def main(arguments: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm

    from tests.ranks import Ranks

    parser = argparse.ArgumentParser(prog="python -m tests.invariance", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the whole product of all axes")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {','.join(STAGES)}")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    cases = dict(product()) if options.all else axes()
    stages = options.stages.split(",")
    matrix, results, failed = Matrix(Ranks()), [], 0
    for stage, (name, case) in tqdm(list(itertools.product(stages, cases.items())), unit="replay"):
        values = matrix.deviation(stage, case)
        past = [m for m in MEASURES if not values[m] <= bounds(case)[m]]
        failed += bool(past)
        results.append({"stage": stage, "case": name, "ranks": case.world, "past": past} | values)
    table = Table("measure", "case", *stages, title="worst deviation from one rank (float32)")
    for measure in MEASURES:
        for name, case in cases.items():
            rows = [row for row in results if row["case"] == name]
            cells = [f"{row[measure]:.1e}{' !' if measure in row['past'] else ''}" for row in rows]
            if not options.all:
                table.add_row(f"{measure} <= {bounds(case)[measure]:.0e}", name, *cells)
        worst = [max(row[measure] for row in results if row["stage"] == stage) for stage in stages]
        table.add_row(measure, "worst", *(f"{x:.1e}" for x in worst), end_section=True)
    Console(width=120).print(table)
    ties = sum(matrix.base(stage, case)["near_ties"] for stage in stages for case in cases.values())
    print(f"{len(results)} replays, {failed} past a bound; tokens near a tie of two experts: {ties}")
    matrix.ranks.close()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
