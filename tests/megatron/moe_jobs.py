"""What the ranks run for test_moe.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head
from aligner.megatron.moe import ExpertLayer
from aligner.megatron.train import ShardedModel
from aligner.ops.packing.pack import Times
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from aligner.types import TrainBatch
from tests.megatron.jobs import build, nll_loss, weights
from tests.tiny import SGD, batch, wild_source


def equal_shares(model: ShardedModel, full: TrainBatch) -> TrainBatch:
    size = len(full.lengths) // model.layout.data
    return full.select(torch.arange(size) + model.layout.dp_rank * size)


def train(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    optim: OptimConfig,
    bc: BatchConfig,
    dtype: torch.dtype = torch.float32,
    outputs: int = 0,
    steps: int = 2,
    full: TrainBatch | None = None,
) -> dict:
    """Some steps on one minibatch, of which every data-parallel rank has as many rows: metrics of each, logprobs, and
    full weights at the end."""
    head = Head("score", outputs) if outputs else Head()
    model = build(cfg, parallel, optim, head, dtype, packed=bc.packing, share=bc.share_prompts)
    full = batch(cfg) if full is None else full
    mine, loss = equal_shares(model, full), nll_loss(model, full, bc.logits_bytes)
    parts = micro_batches(mine, bc, group=model.layout.pgs.dp)
    metrics = [model.step(parts, loss) for _ in range(steps)]
    logprobs = Policy(model, bc).logprobs(full) if head.kind == "lm" else None
    return {"metrics": metrics, "weights": weights(model), "logprobs": logprobs}


def layer(cfg: ModelConfig, parallel: ParallelConfig, x: torch.Tensor, times: torch.Tensor, grad: torch.Tensor) -> dict:
    """The first layer alone: what it computes, and its gradients with the auxiliary loss."""
    model = build(cfg, parallel, SGD)
    first = next(m for m in model.module.modules() if isinstance(m, ExpertLayer))
    x = x.clone().requires_grad_()

    def run():
        return first(x[:, None], Times.of(times))[0][:, 0]

    tokens = TrainBatch(torch.zeros(1, 1), times.sum()[None], torch.zeros(1, 0))
    model.load.layers = [first]
    model.load.begin([tokens], run)
    out = run()
    found = torch.autograd.grad((out * grad).sum(), [x, *first.parameters()])
    return {
        "out": out.detach(),
        "x": found[0],
        "params": dict(zip([n for n, _ in first.named_parameters()], found[1:], strict=True)),
        "weights": {n: p.detach() for n, p in first.named_parameters()},
        "metrics": model.load.metrics(),
    }


def group_ranks(parallel: ParallelConfig) -> dict[str, list[int]]:
    pgs = build_layout(parallel).pgs
    return {n: dist.get_process_group_ranks(getattr(pgs, n)) for n in ("ep", "expt_dp", "tp_ep", "tp_ep_pp")}


def uneven_forward(cfg: ModelConfig, parallel: ParallelConfig, rows: TrainBatch, budget: int, given: list[int]) -> dict:
    """Rank r has the first given[r] rows: micro-batches in different numbers, or none."""
    model = build(cfg, parallel)
    mine = rows.select(torch.arange(given[model.layout.dp_rank]))
    return {"logprobs": Policy(model, BatchConfig(logprob_tokens=budget)).logprobs(mine)}


def save(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, optim: OptimConfig) -> dict:
    """Two steps, save, one more."""
    model, full = build(cfg, parallel, optim), batch(cfg)
    mine, parts = equal_shares(model, full), BatchConfig(micro_batch_samples=2)
    for _ in range(2):
        model.step(micro_batches(mine, parts), nll_loss(model, full))
    save_model(model, folder)
    saved = weights(model)
    return {
        "saved": saved,
        "went_on": model.step(micro_batches(mine, parts), nll_loss(model, full)),
        "after": weights(model),
    }


def load(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, optim: OptimConfig, again: Path | None) -> dict:
    model, full = build(cfg, parallel, optim, source=wild_source(cfg, seed=8)), batch(cfg)
    load_model(model, folder)
    loaded = weights(model)
    if again:
        save_model(model, again)
    parts = micro_batches(equal_shares(model, full), BatchConfig(micro_batch_samples=2))
    return {"loaded": loaded, "resumed": model.step(parts, nll_loss(model, full)), "after": weights(model)}
