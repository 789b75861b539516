"""One GPU against its limits: refit, prefill, decode, logprobs, training, and a whole GRPO step.

    python -m benchmarks.gpu [--shapes 0.6b,1.7b,8b_width] [--budget-s 450] [--json FILE]
    python -m benchmarks.gpu --check        # tiny shapes on any device, CPU included: does it run, do figures add up

Random weights, no files, no network. Every figure stands beside what `aligner plan` predicts for it, and the goal it is
held against. Memory and matrix rates are measured in the same run, beside the data sheet's. Sections that do not fit
into the budget are left out and named; so are shapes that `aligner plan` says the card cannot hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.errors import AlignerError
from aligner.families.table import parameters
from aligner.plan.devices import DEVICES, Assumptions, Device, sheet_of
from aligner.plan.job import Engine, PlanJob, PlannedModel, PlannedRows
from aligner.plan.memory import plan_memory
from aligner.plan.prediction import predict
from aligner.plan.shapes import Grid, active_parameters, decode_weight_bytes, kv_bytes
from aligner.shakedown.rates import measured_rates, median_seconds, seconds
from benchmarks.common import write_json

if TYPE_CHECKING:  # the other one imports Megatron, which takes seconds
    from aligner.types import TrainBatch
    from benchmarks.gpu_bench import Bench

QWEN3 = ModelConfig(
    family="qwen3",
    num_layers=28,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rope_base=1e6,
    qk_norm=True,
)
SHAPES = {
    "0.6b": QWEN3,
    "1.7b": replace(QWEN3, hidden_size=2048, ffn_hidden_size=6144),
    # the width of Llama 3.1 8B, with as many layers as leave room for the optimizer's state on one card
    "8b_width": ModelConfig(
        num_layers=8,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128256,
        tie_embeddings=False,
    ),
    # the width of Qwen3-30B-A3B, with a twelfth of its layers
    "moe_width": replace(
        QWEN3,
        family="qwen3_moe",
        num_layers=4,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        tie_embeddings=False,
        moe=MoeConfig(num_experts=128, top_k=8, ffn_hidden_size=768, norm_topk_prob=True),
    ),
    "check": ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_kv_heads=2, vocab_size=97),
}
# figure -> (goal, what it is a share of)
GOALS = {
    "generate.256.of_bound": (0.60, "bytes of weights and cache / the memory's bandwidth"),
    "train.mfu": (0.47, "6 N operations a token, all of them read / the device's peak, recomputation off"),
    "refit.of_copy": (0.50, "a plain copy of the same bytes"),
    "grpo.rl_mfu": (0.30, "12 N operations a token of the step, by convention / the device's peak"),
}


@dataclass(frozen=True)
class Size:
    prompts: int = 32
    group: int = 8
    prompt_tokens: int = 256
    response_tokens: int = 512
    batches: tuple[int, ...] = (32, 256)  # rows decoded together
    micro_tokens: tuple[int, ...] = (16384, 8192, 4096)  # of training: the first that fits
    kv_bytes: int = 32 << 30
    repeats: int = 3

    @property
    def row(self) -> int:
        return self.prompt_tokens + self.response_tokens


SMALL = Size(4, 2, 8, 8, batches=(4, 8), micro_tokens=(64,), kv_bytes=1 << 24, repeats=1)


@dataclass
class Machine:
    """Rates measured here, and the data sheet's where the device is in the table."""

    device: torch.device
    name: str
    sheet: Device | None
    copy_rate: float  # bytes per second, read and written
    matrix_rate: float  # bfloat16 operations per second

    @property
    def peak(self) -> float:
        return self.sheet.flops if self.sheet else self.matrix_rate

    @property
    def bandwidth(self) -> float:
        return self.sheet.bandwidth if self.sheet else self.copy_rate


@dataclass
class Report:
    figures: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def measure_machine(device: torch.device, small: bool) -> Machine:
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    sheet = sheet_of(name)
    matrix_rate, copy_rate = measured_rates(device, small)
    return Machine(device, name, sheet, copy_rate, matrix_rate)


def job_for(cfg: ModelConfig, size: Size, micro_tokens: int, element: int) -> PlanJob:
    samples = size.prompts * size.group
    rows = PlannedRows(
        samples, size.prompts, size.prompt_tokens, size.prompt_tokens, size.response_tokens, size.response_tokens
    )
    engine = Engine(1, element, max(size.batches), size.kv_bytes)
    return PlanJob(
        "grpo",
        (PlannedModel("policy", cfg, trained=True),),
        Grid(),
        rows,
        engine,
        element=element,
        micro_tokens=micro_tokens,
        logprob_tokens=max(micro_tokens, size.row),
        logits_bytes=8 << 30,
    )


def decode_bound_s(bench: Bench, rows: int, bandwidth: float) -> float:
    """Return the seconds to read weights and every row's cache once for each step but the first, whose token prefill
    gives."""
    cfg, size = bench.cfg, bench.size
    token, steps = kv_bytes(cfg, 2), size.response_tokens - 1
    positions = sum(size.prompt_tokens + t + 1 for t in range(steps))
    return (steps * decode_weight_bytes(cfg, rows, 2) + rows * positions * token) / bandwidth


def waits_in_decode(bench: Bench) -> float:
    """Count the host's waits for the device per decode step, by torch's warnings; one is there by design (`settle`)."""
    few = min(16, bench.size.response_tokens // 2)
    waits = []
    for steps in (few, 2 * few):  # a generation has some of its own
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                bench.generate(bench.size.batches[0], steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in caught))
    return (waits[1] - waits[0]) / few


def measure_refit(bench: Bench, report: Report) -> None:
    device, size = bench.machine.device, parameters(bench.cfg) * 2
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    bench.refit()
    pairs = [
        (seconds(bench.refit, device), seconds(lambda: target.copy_(source), device)) for _ in range(bench.size.repeats)
    ]
    report.figures["refit.gb_per_s"] = size / statistics.median(a for a, _ in pairs) / 1e9
    report.figures["refit.of_copy"] = statistics.median(copy / ours for ours, copy in pairs)


def measure_generate(bench: Bench, report: Report) -> None:
    """Measure decode steps launched kernel by kernel and, on CUDA, as graphs; later sections use the faster way."""
    for rows in bench.size.batches:
        _generate(bench, report, rows, "")
    if bench.machine.device.type != "cuda":
        return
    report.figures["generate.waits_per_step"] = waits_in_decode(bench)
    bench.use_graphs(True)
    try:
        for rows in bench.size.batches:
            _generate(bench, report, rows, ".graphs")
    except RuntimeError as error:
        report.left_out.append(f"decode as CUDA graphs: {error}")
    most = max(bench.size.batches)
    plain, graphs = (report.figures.get(f"generate.{most}{way}.tokens_per_s", 0.0) for way in ("", ".graphs"))
    bench.use_graphs(graphs > plain)


def _generate(bench: Bench, report: Report, rows: int, way: str) -> None:
    device, size = bench.machine.device, bench.size
    bench.generate(
        rows, size.response_tokens if way else 2
    )  # buffers; graphs, which the second step of a shape records
    first = statistics.median(seconds(lambda: bench.generate(rows, 1), device) for _ in range(size.repeats))
    took = seconds(lambda: bench.generate(rows, size.response_tokens), device)
    decode = max(took - first, 1e-9)
    report.figures[f"generate.{rows}{way}.tokens_per_s"] = rows * size.response_tokens / took
    report.figures[f"generate.{rows}{way}.of_bound"] = decode_bound_s(bench, rows, bench.machine.bandwidth) / decode
    report.figures[f"prefill.{rows}{way}.s"] = first


def measure_training(bench: Bench, report: Report) -> None:
    """Measure logprobs and updates that read every token, so that each costs what MFU counts, 2 N and 6 N operations. A
    run reads only responses and does less (`measure_grpo`). Attention is by segments and, on CUDA, by rows of any
    length (`model.varlen_attention`); later sections use the way that is faster on rows of which responses are read."""
    device, size = bench.machine.device, bench.size
    generations = bench.generate(size.prompts * size.group, size.response_tokens)
    rows, read = bench.rows(generations, every=True), bench.rows(generations)
    _train(bench, report, rows, "")
    if device.type != "cuda":
        return
    segments = median_seconds(lambda: bench.update(read), device, 1)
    try:
        bench.use_varlen(True)
        _train(bench, report, rows, ".varlen")
        faster = median_seconds(lambda: bench.update(read), device, 1) < segments
    except (RuntimeError, AlignerError) as error:
        report.left_out.append(f"model.varlen_attention: {error}")
        faster = False
    bench.use_varlen(faster)


def _train(bench: Bench, report: Report, rows: TrainBatch, way: str) -> None:
    device, size, peak = bench.machine.device, bench.size, bench.machine.peak
    tokens, n = int(rows.lengths.sum()), active_parameters(bench.cfg)
    actions = {"logprobs": (2, lambda: bench.policy.logprobs(rows)), "train": (6, lambda: bench.update(rows))}
    for name, (operations, action) in actions.items():
        took = median_seconds(action, device, max(1, size.repeats - 1))
        report.figures[f"{name}{way}.tokens_per_s"] = tokens / took
        report.figures[f"{name}{way}.mfu"] = operations * n * tokens / took / peak


def measure_grpo(bench: Bench, report: Report) -> None:
    """Measure refit, generate, logprobs and update like a run: logits and the last layer only for responses; rewards
    are free here. RL-MFU counts 12 N operations for every token of the step by convention, with any number made: 2 to
    generate, 2 for logprobs, 2 for a reference's (there is none here), 6 to update."""
    device, size = bench.machine.device, bench.size
    parts: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def timed(name: str, action: Callable[[], object]) -> object:
        out: list = []
        parts[name] = seconds(lambda: out.append(action()), device)
        return out[0]

    timed("refit", bench.refit)
    rows = bench.rows(timed("generate", lambda: bench.generate(size.prompts * size.group, size.response_tokens)))
    rows.old_logprobs = timed("logprobs", lambda: bench.policy.logprobs(rows, rows.loss_mask))
    timed("update", lambda: bench.update(rows))
    took, tokens = sum(parts.values()), int(rows.lengths.sum())
    report.figures |= {f"grpo.{name}_s": s for name, s in parts.items()}
    report.figures["grpo.tokens_per_s"] = tokens / took
    if device.type == "cuda":
        report.figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    report.figures["grpo.rl_mfu"] = tokens / took * 12 * active_parameters(bench.cfg) / bench.machine.peak


def measure(name: str, size: Size, machine: Machine, deadline: float = float("inf")) -> Report:
    """Measure all figures of a shape, as far as time allows."""
    cfg, report = SHAPES[name], Report()
    card = machine.sheet or DEVICES["h100"]
    if machine.device.type == "cuda":
        card = replace(card, memory_bytes=torch.cuda.get_device_properties(machine.device).total_memory)
    jobs = {tokens: job_for(cfg, size, tokens, 2) for tokens in size.micro_tokens}
    fitting = [tokens for tokens, job in jobs.items() if plan_memory(job, card, Assumptions()).fits]
    if not fitting:
        report.left_out.append(f"{name}: the plan says that it does not fit")
        return report
    prediction = predict(jobs[fitting[0]], card)
    report.predicted = {f"grpo.{phase}_s": p.seconds for phase, p in prediction.phases.items()}
    report.predicted["peak_gib"] = prediction.memory.peak_bytes / 2**30
    from benchmarks.gpu_bench import Bench

    bench = Bench(cfg, size, fitting[0], machine)
    for section in (measure_refit, measure_generate, measure_training, measure_grpo):
        if time.monotonic() > deadline:
            report.left_out.append(f"{name}: {section.__name__.removeprefix('measure_')}, no time left")
            continue
        section(bench, report)
    bench.close()
    return report


def check() -> dict[str, float]:
    """Run every section on the tiny shape. Raises AssertionError if a figure is missing or impossible."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = measure_machine(device, small=True)
    report = measure("check", SMALL, machine)
    wanted = {"refit.of_copy", "generate.8.of_bound", "logprobs.mfu", "train.mfu", "grpo.rl_mfu", "grpo.update_s"}
    missing = wanted - report.figures.keys()
    assert not missing and not report.left_out, (missing, report.left_out)
    wrong = {name: value for name, value in report.figures.items() if not 0 < value < float("inf")}
    wrong.pop("generate.waits_per_step", None)
    assert not wrong, wrong
    figures = report.figures
    parts = sum(figures[f"grpo.{name}_s"] for name in ("refit", "generate", "logprobs", "update"))
    tokens = SMALL.prompts * SMALL.group * SMALL.row
    assert abs(figures["grpo.tokens_per_s"] * parts / tokens - 1) < 1e-6
    return figures


def show(name: str, report: Report) -> list[str]:
    """Print one line a figure; return the names of missed goals."""
    missed = []
    for key, value in report.figures.items():
        text = f"{name:<10}{key:<28}{value:>14,.3f}"
        if key in report.predicted:
            text += f"   plan {report.predicted[key]:,.3f}"
        if key in GOALS:
            goal, of = GOALS[key]
            met = value >= goal
            text += f"   goal {goal:.2f} {'met' if met else 'MISSED'} (of {of})"
            missed += [] if met else [f"{name} {key}"]
        print(text, flush=True)
    for line in report.left_out:
        print(f"left out: {line}", flush=True)
    return missed


def main(arguments: list[str]) -> int:
    """Exit 0 if everything was measured, 1 if something was left out; missed goals are printed, not failures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="0.6b,1.7b,8b_width")
    parser.add_argument("--budget-s", type=float, default=450.0, help="no section starts after so many seconds")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_s
    if not (options.check or torch.cuda.is_available()):
        parser.error("no CUDA device: --check runs anywhere")
    from aligner.cluster.env import RankEnv
    from aligner.megatron.groups import init_distributed, leave_distributed

    device = init_distributed(RankEnv(), "auto", 600.0)
    try:
        return _checked(device) if options.check else _measured(device, options, deadline)
    finally:
        leave_distributed()


def _checked(device: torch.device) -> int:
    check()
    print(f"the self-check passed on {device}")
    return 0


def _measured(device: torch.device, options: argparse.Namespace, deadline: float) -> int:
    machine = measure_machine(device, small=False)
    print(
        f"{machine.name}, torch {torch.__version__}: bfloat16 products {machine.matrix_rate / 1e12:.0f} TFLOP/s, "
        f"copies {machine.copy_rate / 1e12:.2f} TB/s; data sheet: {machine.sheet}"
    )
    reports, missed = {}, []
    for name in options.shapes.split(","):
        reports[name] = measure(name, Size(), machine, deadline)
        missed += show(name, reports[name])
        torch.cuda.empty_cache()
    print(f"goals missed: {', '.join(missed) or 'none'}")
    rates = {"matrix_rate": machine.matrix_rate, "copy_rate": machine.copy_rate}
    write_json(options.json, {"shapes": {name: vars(report) for name, report in reports.items()}}, **rates)
    return int(any(report.left_out for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
