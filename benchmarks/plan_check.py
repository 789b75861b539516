"""The calculator of `aligner plan` against published step times, settings as published; errors as they are.

    python -m benchmarks.plan_check [--here] [--json FILE]

Constants of `aligner/plan/devices.py` were fitted to the runs with odd numbers ("fit"), not to those with even ones
("test") nor to the last eight ("later"). None of these systems is this project: what they have and we do not is in
their jobs (`PlanJob.overlap` and after, `Grid.virtual`, `Engine.in_flight`) and in `PEERS`. Guesses: the longest
prompt, vLLM's 256 rows, mean prompts (published tokens/s less the mean response), the rank of LoRA (16).

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
from aligner.families.table import parameters
from aligner.plan.devices import DEVICES, GIB, Assumptions, Device
from aligner.plan.job import Engine, PlanJob, PlannedModel, PlannedRows
from aligner.plan.prediction import predict
from aligner.plan.shapes import Grid
from aligner.plan.times import plan_times
from benchmarks.common import write_json

H100, GB200, GB300 = "h100", "gb200", "gb300"
RL6 = "NVIDIA-NeMo/RL v0.6.0, docs/about/performance-summary.md and recipes"
RL5 = "NVIDIA-NeMo/RL v0.5.0, docs/about/performance-summary.md and recipes"
RL4 = "NVIDIA-NeMo/RL cff17f83b (v0.4), docs/about/performance-summary.md and recipes"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge 067f987, docs/performance-summary-archive.md, container "


@dataclass(frozen=True)
class Published:
    """A run, whose name ends with its products' precision if it is FP8. `seconds` of a step. Rows with odd numbers are
    those that constants were fitted to."""

    name: str
    source: str
    device: str
    seconds: float
    job: PlanJob


def shape(name: str, *overrides: str) -> ModelConfig:
    return compose([f"model={name}", *(f"model.{key}" for key in overrides)]).model


LLAMA8, LLAMA70 = shape("llama3_8b"), shape("llama3_70b")
LLAMA405 = shape("llama3_70b", "num_layers=126", "hidden_size=16384", "ffn_hidden_size=53248", "num_heads=128")
QWEN30, DEEPSEEK = shape("qwen3_30b_a3b"), shape("deepseek_v3")
QWEN235 = shape(
    *("qwen3_30b_a3b", "num_layers=94", "hidden_size=4096", "ffn_hidden_size=12288", "num_heads=64"),
    "moe.ffn_hidden_size=1536",
)
QWEN32 = shape(
    *("qwen3_0.6b", "num_layers=64", "hidden_size=5120", "ffn_hidden_size=25600", "num_heads=64"),
    "tie_embeddings=false",
)
GPT_OSS = shape("gpt_oss_20b", "num_layers=36", "moe.num_experts=128")
ENGINE_SHARE = 0.6  # vllm_cfg.gpu_memory_utilization
LATER = 28  # runs that were looked at after all else was done
WORK_BYTES = 3e9  # of vLLM beside weights and cache
OWN, ATTENTION, FUSED = Assumptions(), 1.6, 0.64
# TransformerEngine's: attention as FlashAttention-3's authors have it (1.5 to 2 times as fast as the second, arXiv:
# 2407.08608); rope in 4 passes for 12, norms and residual in 22 for 42, SwiGLU in as many: of an 8B layer 0.64.
# Logits are sampled in as many passes as here. Fitted: messages beside products, and what NeMo-RL's engines take, which
# are actors of Ray.
PEERS = Assumptions(
    flash_forward=ATTENTION * OWN.flash_forward, flash_backward=ATTENTION * OWN.flash_backward,
    element_wise=OWN.element_wise / FUSED, sampled_bytes=OWN.sampled_bytes / FUSED,
    exposed=0.28, engine_s=9e-3, rollout_s=16.0, tensor_s=1.3e-4,
)  # fmt: skip
FP8 = replace(PEERS, fp8=1.65)  # fitted: with casts


def nemo_rl(
    model: ModelConfig,
    samples: tuple[int, int],
    lengths: tuple[float, float, int],
    grid: Grid,
    tensor: int,
    *,
    device: str = H100,
    ranks: int = 0,
    share: float = ENGINE_SHARE,
    lag: int = 0,
    minibatches: int = 1,
    recompute: bool = True,
    **changes,
) -> PlanJob:
    """Return a GRPO job of (samples, prompts) with (mean prompt, mean response, longest row). NeMo-RL computes
    logprobs of policy and reference. It packs rows to the longest, and in a pipeline pads to it: a micro-batch holds
    one row if the mean is more than half."""
    count, prompts = samples
    prompt, response, longest = lengths
    most = min(512, longest // 2)
    rows = PlannedRows(count, prompts, prompt, most, response, longest - most)
    cache = share * DEVICES[device].memory_bytes - 2 * parameters(model) / tensor - WORK_BYTES
    engine = Engine(
        tensor, 2, 256, max(cache, 4e9), True, padded=False, launches=False, placed=False, resident=False,
        early=False, ranks=ranks, lag=lag, in_flight=lag > 0,
    )  # fmt: skip
    alone = prompt + response > longest / 2
    return PlanJob(
        "grpo",
        (PlannedModel("policy", model, trained=True, gradient=2), PlannedModel("reference", model)),
        grid,
        rows,
        engine,
        gpus_per_node=8 if device == H100 else 72,
        minibatches=minibatches,
        micro_rows=1,
        micro_tokens=0 if alone else longest,
        packing=not alone or grid.pipeline == 1,
        logprob_tokens=longest if alone else 2 * longest,
        recompute=recompute * model.num_layers,
        offload=("gradients", "optimizer", "weights"),
        overlap=("dp", "edp"),
        pairs=True,
        **changes,
    )


def pretraining(model: ModelConfig, batch: int, length: int, grid: Grid, device: str = H100, **changes) -> PlanJob:
    rows = PlannedRows(batch, batch, 1, 1, length - 1, length - 1)
    return PlanJob(
        "sft",
        (PlannedModel("policy", model, trained=True, gradient=2),),
        grid,
        rows,
        None,
        gpus_per_node=8 if device == H100 else 72,
        **{"micro_rows": 1, "overlap": ("dp", "edp", "pp"), "pairs": True} | changes,
    )


def published() -> list[Published]:
    """Return the runs in the order of their sources."""
    many, few, sixteen = (2048, 64), (512, 32), (512, 16)
    dense = {"minibatches": 4}
    tp, flex = ("tp", "dp", "edp", "pp"), {"pairs": False}
    rl = [
        ("DeepSeek-V3, 256", RL6, H100, 134, nemo_rl(DEEPSEEK, few, (109, 701, 1536), Grid(1, 16, 1, 16, 16), 32)),
        ("DeepSeek-V3, 512", RL6, H100, 111, nemo_rl(DEEPSEEK, few, (106, 697, 1536), Grid(1, 16, 1, 32, 32), 32)),
        ("DeepSeek-V3, 256 + 256", RL6, H100, 64.1,
         nemo_rl(DEEPSEEK, few, (106, 710, 1536), Grid(1, 16, 1, 16, 16), 32, ranks=256, lag=1, share=0.8)),
        ("Qwen3-235B, 128", RL6, H100, 395,
         nemo_rl(QWEN235, sixteen, (118, 5698, 8192), Grid(2, 8, 2, 16, 4, True), 16)),
        ("Qwen3-235B, 256", RL6, H100, 312,
         nemo_rl(QWEN235, sixteen, (121, 5713, 8192), Grid(2, 8, 2, 16, 8, True), 16)),
        ("Qwen3-235B, 128 + 128", RL6, H100, 231,
         nemo_rl(QWEN235, sixteen, (118, 5721, 8192), Grid(4, 8, 1, 16, 4, True), 8, ranks=128, lag=1,
                 share=0.8)),
        ("Qwen3-30B-A3B, 32", RL6, H100, 192,
         nemo_rl(QWEN30, many, (103, 3203, 4096), Grid(1, 1, 1, 8, 32), 2, recompute=False, **dense)),
        ("Qwen3-30B-A3B, 16 + 16", RL6, H100, 152,
         nemo_rl(QWEN30, many, (103, 3201, 4096), Grid(1, 2, 1, 8, 8), 2, recompute=False, ranks=16, lag=1, share=0.8,
                 **dense)),
        ("Qwen3-30B-A3B, 128 + 64", RL6, H100, 34.5,
         nemo_rl(QWEN30, many, (103, 3206, 4096), Grid(1, 1, 1, 8, 128), 2, recompute=False, ranks=64, lag=8, share=0.8,
                 **dense)),
        ("Llama-3.1-8B, 16", RL5, H100, 92.8,
         nemo_rl(LLAMA8, many, (127, 1019, 4096), Grid(1, 2, data=8), 1, **dense)),
        ("Llama-3.1-8B, 8 + 8", RL5, H100, 64.8,
         nemo_rl(LLAMA8, many, (127, 1123, 4096), Grid(data=8), 1, ranks=8, lag=1, share=0.8, **dense)),
        ("Qwen3-32B, 32", RL5, H100, 376,
         nemo_rl(QWEN32, many, (103, 3251, 4096), Grid(4, 4, data=2, sequence=True), 4, recompute=False, **dense)),
        ("Qwen3-32B, 32 + 32", RL5, H100, 200,
         nemo_rl(QWEN32, many, (103, 3252, 4096), Grid(4, 4, data=2, sequence=True), 4, recompute=False, ranks=32,
                 lag=1, share=0.8, **dense)),
        ("DeepSeek-V3, 128 GB200", RL6, GB200, 108,
         nemo_rl(DEEPSEEK, few, (109, 711, 1536), Grid(1, 8, 1, 16, 16), 32, device=GB200, share=0.3)),
        ("Qwen3-235B, 64 GB200", RL6, GB200, 286,
         nemo_rl(QWEN235, sixteen, (118, 5709, 8192), Grid(2, 4, 2, 16, 4, True), 8, device=GB200,
                 share=0.4)),
        ("Qwen3-30B-A3B, 16 GB200", RL6, GB200, 221,
         nemo_rl(QWEN30, many, (103, 3199, 4096), Grid(1, 1, 1, 16, 16), 1, device=GB200, recompute=False, **dense)),
    ]  # fmt: skip
    pre = [
        ("Llama-3-8B, 8, FP8", "25.11", H100, 14451, pretraining(LLAMA8, 128, 8192, Grid(data=8), kept=0.6)),
        ("Llama-3-70B, 64, FP8", "26.04.01", H100, 1664,
         pretraining(LLAMA70, 256, 8192, Grid(4, 8, data=2, sequence=True, virtual=5), kept=0.6, overlap=tp)),
        ("GPT-OSS-120B, 64, BF16", "26.04.01", H100, 5824, pretraining(GPT_OSS, 1280, 4096, Grid(1, 4, 1, 8, 16))),
        ("Qwen3-30B-A3B, 16, FP8", "26.04.01", H100, 8960,
         pretraining(QWEN30, 1024, 4096, Grid(expert=16, data=16), kept=0.6, **flex)),
        ("Qwen3-235B, 256, FP8", "26.04.01", H100, 1712,
         pretraining(QWEN235, 8192, 4096, Grid(2, 8, 1, 32, 16, True, virtual=4), kept=0.6,
                     overlap=("dp", "edp", "pp", "ep"))),
        ("DeepSeek-V3, 1,024, FP8", "25.09", H100, 1297,
         pretraining(DEEPSEEK, 8192, 4096, Grid(2, 8, 1, 64, 64, True, virtual=4), **flex,
                     overlap=("dp", "edp", "pp", "ep"), kept=0.45)),
        ("Llama-3.1-405B, 1,024, FP8", "26.04.01", H100, 328,
         pretraining(LLAMA405, 1536, 8192, Grid(8, 8, 2, data=8, sequence=True, virtual=8), kept=0.6, overlap=tp)),
        ("Llama-3-70B SFT, 32, FP8", "26.06", H100, 1638,
         pretraining(LLAMA70, 32, 4096, Grid(4, 4, data=2, sequence=True, virtual=5), kept=0.6, overlap=tp)),
        ("Llama-3-70B LoRA, 8, FP8", "26.06", H100, 2643,
         pretraining(shape("llama3_70b", "lora.rank=16"), 32, 4096, Grid(2, 4, sequence=True, virtual=20), kept=0.6,
                     overlap=tp)),
        ("DeepSeek-V3, 256 GB200, BF16", "25.11", GB200, 3139,
         pretraining(DEEPSEEK, 4096, 4096, Grid(1, 4, 1, 64, 64, virtual=4), GB200, kept=0.65)),
        ("GPT-OSS-120B, 64 GB200, BF16", "25.11", GB200, 15876,
         pretraining(GPT_OSS, 1280, 8192, Grid(expert=64, data=64), GB200)),
        ("Qwen3-235B, 256 GB200, BF16", "25.11", GB200, 4916,
         pretraining(QWEN235, 8192, 4096, Grid(1, 8, 1, 32, 32, virtual=3), GB200)),
    ]  # fmt: skip
    later_rl = [
        ("Llama-3.1-8B, 8 GB200", RL5, GB200, 91.0,
         nemo_rl(LLAMA8, many, (127, 1066, 4096), Grid(data=8), 1, device=GB200, **dense)),
        ("Llama-3.1-8B, 4 + 4 GB200", RL5, GB200, 71.1,
         nemo_rl(LLAMA8, many, (127, 1107, 4096), Grid(data=4), 1, device=GB200, ranks=4, lag=1, share=0.8, **dense)),
        ("Qwen3-32B, 16 GB200", RL5, GB200, 381,
         nemo_rl(QWEN32, many, (103, 3253, 4096), Grid(2, data=8, sequence=True), 1, device=GB200, recompute=False,
                 **dense)),
        ("Qwen3-32B, 16 + 16 GB200", RL5, GB200, 210,
         nemo_rl(QWEN32, many, (103, 3258, 4096), Grid(2, data=8, sequence=True), 1, device=GB200, recompute=False,
                 ranks=16, lag=1, share=0.8, **dense)),
        ("Qwen3-30B-A3B, 32, tp2", RL4, H100, 225,
         nemo_rl(QWEN30, many, (103, 3154, 4096), Grid(2, 1, 1, 8, 16, True), 4, recompute=False, **dense)),
    ]  # fmt: skip
    later_pre = [
        ("DeepSeek-V3, 256 GB300, BF16", "25.11", GB300, 3848,
         pretraining(DEEPSEEK, 4096, 4096, Grid(1, 2, 1, 32, 128, virtual=4), GB300, kept=0.85)),
        ("GPT-OSS-120B, 64 GB300, BF16", "25.11", GB300, 18347,
         pretraining(GPT_OSS, 1280, 8192, Grid(expert=64, data=64), GB300, micro_rows=2)),
        ("Qwen3-235B, 256 GB300, BF16", "25.11", GB300, 6131,
         pretraining(QWEN235, 8192, 4096, Grid(1, 4, 1, 16, 64, virtual=12), GB300, micro_rows=2, kept=0.8)),
    ]  # fmt: skip
    runs = [Published(*run) for run in rl]
    runs += [_by_rate(*run) for run in pre]
    return runs + [Published(*run) for run in later_rl] + [_by_rate(*run) for run in later_pre]


def _by_rate(name: str, container: str, device: str, rate: float, job: PlanJob) -> Published:
    """Return the run of which tokens a second and GPU are published."""
    return Published(name, BRIDGE + container, device, job.rows.tokens / rate / job.gpus, job)


def compare(number: int, case: Published) -> dict:
    prediction = predict(case.job, DEVICES[case.device], FP8 if case.name.endswith("FP8") else PEERS)
    return {
        "case": case.name,
        "half": "later" if number > LATER else "fit" if number % 2 else "test",
        "source": case.source,
        "gpus": case.job.gpus,
        "published_s": case.seconds,
        "predicted_s": prediction.step_s,
        "error": prediction.step_s / case.seconds - 1,
        "fits": prediction.memory.fits,
        "gib": prediction.memory.peak_bytes / GIB,
        "in": prediction.memory.peak,
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
    from benchmarks.floor_phases import BEST as best

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
    compared = [compare(number, case) for number, case in enumerate(published(), start=1)]
    print(f"{'run':<30}{'half':>5}{'published s':>12}{'predicted s':>12}{'error':>7}{'GiB':>6}   phases")
    for row in compared:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases_s"].items())
        print(
            f"{row['case']:<30}{row['half']:>5}{row['published_s']:12.1f}{row['predicted_s']:12.1f}{row['error']:7.0%}"
            f"{row['gib']:6.0f}{' ' if row['fits'] else '!'}  {phases}"
        )
    for half in ("fit", "test", "later"):
        errors = [abs(row["error"]) for row in compared if row["half"] == half]
        print(f"{half}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.0%}, of {len(errors)} runs")
    write_json(options.json, {"rows": compared})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
