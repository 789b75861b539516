"""Stages x families x layouts, rehearsed at full width and reduced depth: `python -m tests.rehearse.grid [N]` runs
every N-th case. Every pair of a stage, a family and a layout is in some case."""

import sys
import tempfile
from itertools import product
from pathlib import Path

from aligner.config.resolve import compose
from aligner.config.stages import STAGES
from aligner.plan.devices import find_device
from aligner.rehearse.command import cases_of, run
from aligner.rehearse.report import Rehearsal

SMALL = [
    *("data.max_prompt_tokens=48", "data.max_tokens=128", "sampling.max_response_tokens=64", "batch.sequences=8"),
    *("batch.prompts=8", "batch.group=4", "batch.minibatch_samples=0", "batch.epochs=1", "batch.micro_batch_samples=4"),
]
FAMILIES = {  # model: its shape; where there are two kinds of layers, both
    **{name: [] for name in ("llama3_8b", "qwen2.5_7b", "qwen3_1.7b", "gemma2_2b", "olmo2_1b", "phi4_mini")},
    "smollm3_3b": ["model.attention.nope_layers=[1]"],
    "qwen3.5_9b": ["model.linear.attention_every=2"],
    "gemma4_31b": ["model.attention.global_every=2"],
    "gemma4_e4b": [
        *("model.num_layers=4", "model.attention.global_every=2", "model.attention.kv_shared_layers=2"),
        "model.double_mlp=true",
    ],
    "qwen3_30b_a3b": ["model.moe.num_experts=16"],
    "gpt_oss_20b": ["model.moe.num_experts=8"],
    "deepseek_v3": ["model.moe.num_experts=16", "model.moe.dense_layers=[0]"],
    "glm5": [
        "model.moe.num_experts=16",
        "model.moe.dense_layers=[0]",
        "model.indexer.top_k=24",
        "model.indexer.loss=0.5",
    ],
    "deepseek_v4_flash": [
        *("model.moe.num_experts=16", "model.moe.hash_layers=1", "model.indexer.top_k=8"),
        *("model.num_layers=4", "model.attention.global_layers=[1,2,3]", "model.entries.heavy_layers=[2]"),
    ],
    "qwen3_next_80b_a3b": ["model.moe.num_experts=16", "model.linear.attention_every=2"],
    "nemotron3_nano_30b_a3b": ["model.moe.num_experts=16", "model.num_layers=4", "model.pattern=ME*-"],
    "glm4.5_air": ["model.moe.num_experts=16"],
    "gemma4_26b_a4b": ["model.moe.num_experts=16", "model.attention.global_every=2"],
}
EXPERTS = tuple(name for name, keys in FAMILIES.items() if any("moe.num_experts" in key for key in keys))
LAYOUTS = {
    "data": [],
    "tensor": ["parallel.tensor=2"],
    "sequence": ["parallel.tensor=2", "parallel.sequence=true"],
    "pipeline": ["parallel.pipeline=2"],
    "context": ["parallel.context=2"],
    "heads": ["parallel.context=2", "parallel.context_mode=alltoall"],
    # one data-parallel rank, which has all samples: as many micro-batches of them as stages
    "all": [
        *("parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2", "parallel.sequence=true"),
        "batch.prompts=2",
    ],
    "engine": ["parallel.tensor=2", "engine.tensor_parallel=2", "memory.offload=[weights,optimizer,gradients]"],
}
MORE = {"expert": ["parallel.expert=4"], "expert+tensor": ["parallel.expert=2", "parallel.tensor=2"]}
BESIDE, STAGED = ("gemma4_e4b",), ("pipeline", "all")  # layers that pass more than hidden states; not stages
Case = tuple[str, str, str]


def cases() -> list[Case]:
    """Pairs of a family and a layout with the next stage in turn; then the pairs with a stage that this leaves out."""
    stages, layouts = sorted(STAGES), {**LAYOUTS, **MORE}
    pairs = [(f, name) for f, name in product(FAMILIES, layouts) if name in LAYOUTS or f in EXPERTS]
    pairs = [(f, name) for f, name in pairs if not (f in BESIDE and name in STAGED)]
    results = [(stages[i % len(stages)], *pair) for i, pair in enumerate(pairs)]
    for stage, layout in product(stages, layouts):
        if not any(case[::2] == (stage, layout) for case in results):
            results.append((stage, EXPERTS[len(results) % len(EXPERTS)], layout))
    for stage, family in product(stages, FAMILIES):
        if not any(case[:2] == (stage, family) for case in results):
            own = [name for name in LAYOUTS if (family, name) in pairs]
            results.append((stage, family, own[len(results) % len(own)]))
    return results


def overrides(stage: str, family: str, layout: str) -> list[str]:
    shape = ["model.num_layers=2", *FAMILIES[family]]
    alone = ["batch.group=1"] * (stage == "distill")  # answers of one prompt have no use there
    return [f"stage={stage}", f"model={family}", *shape, *SMALL, *alone, *{**LAYOUTS, **MORE}[layout]]


def rehearsed(chosen: list[Case], folder: Path, gpus: int = 8) -> dict[Case, Rehearsal]:
    results, jobs = {}, {}
    for number, case in enumerate(chosen):
        jobs[case] = cases_of(compose(overrides(*case)), gpus, "stages", folder / str(number))
    outs = {case["out"]: name for name, (_, ranks) in jobs.items() for case in ranks}
    every = [case for _, ranks in jobs.values() for case in ranks]
    records = dict(zip((case["out"] for case in every), run(every, "h100", folder), strict=True))
    for name, (ready, _) in jobs.items():
        own = {record["rank"]: record for out, record in records.items() if outs[out] == name}
        results[name] = Rehearsal(ready, gpus, find_device("h100"), own, 0.0)
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        every = cases()[:: int(sys.argv[1]) if len(sys.argv) > 1 else 1]
        for case, rehearsal in rehearsed(every, Path(name)).items():
            seconds = sum(record["cpu_s"] for record in rehearsal.records.values())
            print(f"{' '.join(case):<50}{seconds:6.1f} CPU s  {'; '.join(rehearsal.faults) or 'no fault'}")
