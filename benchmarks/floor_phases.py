"""The phases of a step as actions to time, and their floors by the formulas of `aligner plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.families.table import parameters
from aligner.ops.kernels.bfloat16_products import widened
from aligner.plan.devices import Assumptions, Device
from aligner.plan.job import Engine, PlanJob, PlannedModel, PlannedRows
from aligner.plan.reads import reads
from aligner.plan.shapes import Grid, decode_weight_bytes, kv_bytes
from aligner.plan.times import (
    Machine,
    adam_bytes,
    decode_step,
    forward_phase,
    generate_phase,
    refit_phase,
    update_phase,
)
from aligner.shakedown.rates import Copy, Products
from aligner.types import PolicyTargets, TrainBatch
from benchmarks import gpu
from benchmarks.common import busy_seconds
from benchmarks.gpu_bench import Bench
from benchmarks.versus.workload import SIZES, long_tailed

PHASES = ("prefill", "decode", "logprobs", "update", "refit")
# element-wise kernels are free
BEST = Assumptions(
    products=1, experts=1, flash_forward=1, flash_backward=1.25, memory=1, decode=1, element_wise=float("inf"), link=1,
    kernel_s=0, launch_s=0, sampler_s=0, message_s=0,
)  # fmt: skip
SQUARE = 768  # of the product that is taken for the machine's best
LARGEST_COPY = 1 << 29  # bytes moved; beyond every cache


@dataclass(frozen=True)
class Work:
    """Generation: `prompts` x `group` rows of one length. Training: `sequences` rows with responses of up to four times
    as many tokens, long-tailed, their mean about as many."""

    cfg: ModelConfig
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 64
    response_tokens: int = 32
    sequences: int = 64
    micro_tokens: int = 2048

    @property
    def rows(self) -> int:
        return self.prompts * self.group


def model_of(name: str) -> ModelConfig:
    size = SIZES[name]
    return ModelConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.ffn,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        vocab_size=size.vocab,
    )


WORKS = {
    "quickstart": Work(
        ModelConfig(vocab_size=91), 128, 16, prompt_tokens=8, response_tokens=6, sequences=512, micro_tokens=4096
    ),
    "3m": Work(model_of("3m")),
    "30m": Work(model_of("30m"), sequences=24),
    "120m": Work(model_of("120m"), prompts=2, sequences=8),
    "check": Work(gpu.SHAPES["check"], 3, 2, 20, 4, sequences=4, micro_tokens=256),
}


def training_rows(work: Work) -> TrainBatch:
    responses = torch.tensor(long_tailed(work.sequences, 4 * work.response_tokens, 0))
    lengths = work.prompt_tokens + responses
    width = int(lengths.max())
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(width)[None]
    real = positions < lengths[:, None]
    mask = (real & (positions >= work.prompt_tokens)).float()
    tokens = torch.randint(1, work.cfg.vocab_size, (work.sequences, width), generator=generator) * real
    advantages = torch.randn(work.sequences, 1, generator=generator) * mask
    return TrainBatch(tokens, lengths, mask, [PolicyTargets(advantages, -torch.ones_like(mask) * mask)])


def jobs(work: Work, element: int) -> tuple[PlanJob, PlanJob]:
    """Return (the job of generation, that of training) for `aligner plan`."""
    w, model = work, PlannedModel("policy", work.cfg, trained=True, distributed=False)
    engine = Engine(1, element, w.rows, 1 << 40, launches=False)
    made = PlannedRows(w.rows, w.prompts, w.prompt_tokens, w.prompt_tokens, w.response_tokens, w.response_tokens)
    lengths = training_rows(w).lengths.double()
    mean, responses = float(lengths.mean()), float((lengths - w.prompt_tokens).sum())
    seen = float((lengths * (lengths + 1)).sum() / lengths.sum() / 2)
    # the token before the first of a response sees the prompt, the one before the last all but that
    read_seen = float((lengths * (lengths - 1) - w.prompt_tokens * (w.prompt_tokens - 1)).sum() / responses / 2)
    trained = PlannedRows(
        w.sequences,
        w.sequences,
        w.prompt_tokens,
        w.prompt_tokens,
        mean - w.prompt_tokens,
        int(lengths.max()) - w.prompt_tokens,
        seen,
        read_seen,
    )
    job = PlanJob(
        "grpo", (model,), Grid(), made, engine, element=element, micro_tokens=w.micro_tokens, logits_bytes=8 << 30
    )
    return job, replace(job, rows=trained)


def machine_of(products_rate: float, copy_rate: float) -> Machine:
    return Machine(Device("here", products_rate, 1e15, copy_rate, 1.0, 1.0), BEST, 1)


def floor_s(phase: str, work: Work, element: int, products_rate: float, copy_rate: float) -> float:
    """Return the seconds by the formulas of `aligner plan`. Decode: all steps but the first token's, which prefill
    gives."""
    machine = machine_of(products_rate, copy_rate)
    generation, training = jobs(work, element)
    if phase == "prefill":
        return generate_phase(generation, machine).parts["prefill"]
    if phase == "decode":
        reach = range(work.prompt_tokens + 1, work.prompt_tokens + work.response_tokens)
        return sum(decode_step(generation, machine, work.rows, context)[0] for context in reach)
    if phase == "logprobs":
        return forward_phase(training, training.models, machine).seconds
    if phase == "update":
        return update_phase(training, machine).seconds
    return refit_phase(generation, machine).seconds


def moved_bytes(phase: str, work: Work, element: int) -> float:
    """Return the bytes that the phase's formula counts at a time; other phases are bound by products alone."""
    cfg = work.cfg
    if phase == "decode":
        reach = work.prompt_tokens + work.response_tokens // 2
        return decode_weight_bytes(cfg, work.rows, element) + work.rows * reach * kv_bytes(cfg, element)
    return {"update": adam_bytes(element), "refit": 2 * element}.get(phase, 0) * float(parameters(cfg))


def own_shapes(phase: str, work: Work) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Return (how often, (m, n, k) of its products): of each layer but the last one, of that, and of the head."""
    rows = {"prefill": work.prompts * work.prompt_tokens, "decode": work.rows}.get(phase, work.micro_tokens)
    cfg, kept = work.cfg, rows
    if phase in ("logprobs", "update"):  # in the last layer and the head, of what is read
        training = jobs(work, 4)[1]
        kept = round(reads(training, training.policy, rows).kept)
    h, f, a, k = (
        cfg.hidden_size,
        cfg.ffn_hidden_size,
        cfg.num_heads * cfg.kv_channels,
        cfg.num_kv_heads * cfg.kv_channels,
    )
    mixed, rest = (a + 2 * k, h), [(h, a), (2 * f, h), (h, f)]
    layer = [(rows, *mixed), *((rows, *matrix) for matrix in rest)]
    last = [(rows, *mixed), *((kept, *matrix) for matrix in rest)]
    products = [(cfg.num_layers - 1, layer), (1, last), (int(phase != "prefill"), [(kept, cfg.vocab_size, h)])]
    if phase == "update":  # the gradients of the input and of the weight too
        products = [
            (times, [s for m, n, k in shapes for s in ((m, n, k), (m, k, n), (n, k, m))]) for times, shapes in products
        ]
    return products


class OwnShapes:
    """The rate of a phase's products at its own shapes, each as often as it occurs."""

    def __init__(self, phase: str, work: Work, dtype: torch.dtype, device: torch.device):
        self.products = [(times, Products(shapes, dtype, device)) for times, shapes in own_shapes(phase, work) if times]

    def rate(self, device: torch.device) -> float:
        took = sum(times * busy_seconds(products, device) for times, products in self.products)
        return sum(times * products.operations for times, products in self.products) / took


class Subject:
    """The timed bench of `benchmarks/gpu_bench.py`: its phases as actions, and the rates measured with them."""

    def __init__(self, work: Work, dtype: torch.dtype, device: torch.device):
        self.work, self.device, self.element = work, device, dtype.itemsize
        longest = work.prompt_tokens + 4 * work.response_tokens
        size = gpu.Size(
            work.prompts,
            work.group,
            work.prompt_tokens,
            work.response_tokens,
            batches=(work.rows,),
            micro_tokens=(work.micro_tokens,),
            kv_bytes=2 * work.rows * longest * kv_bytes(work.cfg, self.element),
        )
        machine = gpu.Machine(device, str(device), None, 1.0, 1.0)
        self.bench = Bench(work.cfg, size, work.micro_tokens, machine, dtype)
        self.bench.policy.batch = replace(self.bench.batch, logprob_tokens=BatchConfig().logprob_tokens)
        self.bench.refit()  # an engine without weights does not generate
        self.rows = training_rows(work)
        # where bfloat16 has no units, its best products are those of float32 (the results of bfloat16 fit in)
        kind = torch.float32 if widened(device, dtype) else dtype
        self.square = Products([(SQUARE, SQUARE, SQUARE)], kind, device)
        self.products = {p: OwnShapes(p, work, kind, device) for p in PHASES if p != "refit"}
        self.copies = {p: Copy(self._copied(p), device) for p in PHASES if moved_bytes(p, work, self.element)}

    def _copied(self, phase: str) -> float:
        moved = moved_bytes(phase, self.work, self.element)
        return moved if phase == "refit" else min(moved, LARGEST_COPY)

    def action(self, phase: str) -> Callable[[], object]:
        work, bench = self.work, self.bench
        return {
            "prefill": partial(bench.generate, work.rows, 1),
            "decode": partial(bench.generate, work.rows, work.response_tokens),
            "logprobs": lambda: bench.policy.logprobs(self.rows, self.rows.loss_mask),
            "update": lambda: bench.update(self.rows),
            "refit": bench.refit,
        }[phase]

    def rates(self, phase: str) -> tuple[float, float, float]:
        """Return (best products, products of the phase's shapes, copies): operations and bytes per second."""
        square = self.square.operations / busy_seconds(self.square, self.device)
        own = self.products[phase].rate(self.device) if phase in self.products else square
        copy = self.copies.get(phase)
        copied = copy.moved / busy_seconds(copy, self.device) if copy else float("inf")
        return max(square, own), own, copied

    def repeat(self) -> dict[str, dict[str, float]]:
        """Measure every phase once, between measurements of the rates."""
        figures: dict[str, dict[str, float]] = {}
        for phase in PHASES:
            before = self.rates(phase)
            took = busy_seconds(self.action(phase), self.device)
            best, own, copied = ((a + b) / 2 for a, b in zip(before, self.rates(phase), strict=True))
            if phase == "decode":  # the generation less its first token
                took = max(took - figures["prefill"]["seconds"], 1e-9)
            bound = partial(floor_s, phase, self.work, self.element)
            figures[phase] = {
                "seconds": took,
                "floor_s": bound(best, copied),
                "products_s": bound(best, float("inf")),
                "memory_s": bound(float("inf"), copied),
                "own_shapes_s": bound(own, float("inf")),
                "matrix_gflops": best / 1e9,
                "own_gflops": own / 1e9,
                "copy_gb_s": copied / 1e9,
            }
        figures["refit"]["pack_s"] = busy_seconds(self.pack, self.device)  # or the next prefill would
        return figures

    @torch.inference_mode()
    def pack(self) -> None:
        self.bench.engine.model.packs.pack()
