"""Stages x families x layouts, rehearsed at full width and reduced depth: `python -m tests.rehearse.grid [N]` runs
every N-th case. Each case is a pair of a family and a layout, with the next stage in turn."""

import sys
import tempfile
from itertools import product
from pathlib import Path

from aligner.config.resolve import compose
from aligner.plan.devices import find_device
from aligner.rehearse.command import cases_of, run
from aligner.rehearse.report import Rehearsal

SMALL = [
    *("data.max_prompt_tokens=48", "data.max_tokens=128", "sampling.max_response_tokens=64", "batch.sequences=8"),
    *("batch.prompts=8", "batch.group=4", "batch.minibatch_samples=0", "batch.epochs=1", "batch.micro_batch_samples=4"),
]
STAGES = ("sft", "rm", "dpo", "kto", "distill", "grpo", "ppo", "online_dpo")
FAMILIES = (
    *("llama3_8b", "qwen2.5_7b", "qwen3_1.7b", "gemma2_2b", "olmo2_1b", "phi4_mini", "smollm3_3b"),
    *("qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v3", "qwen3_next_80b_a3b"),
)
EXPERTS = FAMILIES[7:]
DEPTH = {
    "smollm3_3b": ["model.num_layers=4", "model.attention.nope_layers=[1,3]"],
    "qwen3_next_80b_a3b": ["model.num_layers=8", "model.moe.num_experts=32"],  # both kinds of layers on each stage
    "deepseek_v3": ["model.num_layers=4", "model.moe.num_experts=16"],
    "gpt_oss_20b": ["model.num_layers=4", "model.moe.num_experts=8"],
}
LAYOUTS = {
    "data": [],
    "tensor": ["parallel.tensor=2"],
    "sequence": ["parallel.tensor=2", "parallel.sequence=true"],
    "pipeline": ["parallel.pipeline=2"],
    "context": ["parallel.context=2"],
    "heads": ["parallel.context=2", "parallel.context_mode=alltoall"],
    "all": ["parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2", "parallel.sequence=true"],
    "engine": ["parallel.tensor=2", "engine.tensor_parallel=2", "memory.offload=[weights,optimizer,gradients]"],
}
MORE = {"expert": ["parallel.expert=4"], "expert+tensor": ["parallel.expert=2", "parallel.tensor=2"]}


def cases() -> list[tuple[str, str, str]]:
    pairs = [
        (family, layout)
        for family, layout in product(FAMILIES, {**LAYOUTS, **MORE})
        if layout in LAYOUTS or family in EXPERTS
    ]
    return [(STAGES[i % len(STAGES)], family, layout) for i, (family, layout) in enumerate(pairs)]


def overrides(stage: str, family: str, layout: str) -> list[str]:
    shape = DEPTH.get(family, ["model.num_layers=4"])
    return [f"stage={stage}", f"model={family}", *shape, *{**LAYOUTS, **MORE}[layout], *SMALL]


def rehearsed(chosen: list[tuple[str, str, str]], folder: Path, gpus: int = 8) -> dict[tuple[str, str, str], Rehearsal]:
    found, jobs = {}, {}
    for number, case in enumerate(chosen):
        jobs[case] = cases_of(compose(overrides(*case)), gpus, "stages", folder / str(number))
    outs = {case["out"]: name for name, (_, ranks) in jobs.items() for case in ranks}
    every = [case for _, ranks in jobs.values() for case in ranks]
    records = dict(zip((case["out"] for case in every), run(every, "h100", folder), strict=True))
    for name, (ready, _) in jobs.items():
        own = {record["rank"]: record for out, record in records.items() if outs[out] == name}
        found[name] = Rehearsal(ready, gpus, find_device("h100"), own, 0.0)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        every = cases()[:: int(sys.argv[1]) if len(sys.argv) > 1 else 1]
        for case, rehearsal in rehearsed(every, Path(name)).items():
            seconds = sum(record["cpu_s"] for record in rehearsal.records.values())
            print(f"{' '.join(case):<50}{seconds:6.1f} CPU s  {'; '.join(rehearsal.faults) or 'no fault'}")
