"""What the ranks run for `test_lora`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from aligner.config.schema import BatchConfig, ParallelConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import gather_weights
from aligner.models.adapters import adapter_table
from aligner.models.families import family_table
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from tests.megatron.jobs import ONE, build, nll_loss, shares, weights
from tests.tiny import ADAM, SGD, batch

APART = BatchConfig(share_prompts=False)
FAST = replace(ADAM, lr=1e-2)


def factors(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Of this stage, whole. Collective over tensor and expert ranks."""
    named = {spec.canonical: param for spec, param in model.adapted.named()}
    return {spec.canonical: t.clone() for spec, t in gather_weights(adapter_table(model.cfg), named, model.layout)}


def own_factors(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Those that all tensor ranks have whole, as this one has them."""
    return {s.canonical: p.detach().clone() for s, p in model.adapted.named() if s.tp_axis is None}


def steps(model: ShardedModel, count: int, bc: BatchConfig = APART) -> list[dict]:
    full = batch(model.cfg)
    mine, loss = shares(model, full), nll_loss(model, full)
    return [model.step(micro_batches(mine, bc), loss) for _ in range(count)]


def train(
    cfg: ModelConfig,
    parallel: ParallelConfig = ONE,
    count: int = 5,
    optim: OptimConfig = FAST,
    head: Head = Head(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.float32,
    bc: BatchConfig = APART,
) -> dict:
    model = build(cfg, parallel, optim, head, dtype, packed=bc.packing, share=bc.share_prompts)
    metrics = steps(model, count, bc)
    buffers = model.wrapped.buffers + model.wrapped.expert_parallel_buffers
    return {
        "metrics": metrics,
        "factors": factors(model),
        "own": own_factors(model),
        "weights": weights(model),
        "logprobs": Policy(model, bc).logprobs(batch(cfg)) if head.kind == "lm" else None,
        "gradient_numbers": sum(b.grad_data.numel() for b in buffers),
        "trained": sum(p.numel() for p in model.module.parameters() if p.requires_grad),
    }


def gradients(cfg: ModelConfig, parallel: ParallelConfig = ONE, wild: float = 0.0) -> dict:
    """One step of gradient descent with learning rate 1 from factors that are not their first: before and after."""
    model = build(cfg, parallel, SGD, packed=True, share=False)
    _shake(model, wild)
    before = factors(model) | weights(model)
    stats = steps(model, 1)
    return {"before": before, "after": factors(model), "loss": stats[0]["loss"]}


@torch.no_grad()
def _shake(model: ShardedModel, size: float) -> None:
    for spec, param in model.adapted.named():
        g = torch.Generator().manual_seed(len(spec.canonical) + sum(map(ord, spec.canonical)))
        param.add_(size * torch.randn(param.shape, generator=g))
    model.optimizer.reload_model_params()


def merged_is_adapted(cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of trained adapters, and of a plain model with the merged weights."""
    model = build(cfg, ONE, FAST, dtype=dtype)
    steps(model, 3, BatchConfig())
    _shake(model, 0.1)
    table = family_table(cfg, model.head.kind, model.head.outputs)
    full = {spec.canonical: t.float() for spec, t in gather_weights(table, model.weights(), model.layout)}
    plain = build(replace(cfg, lora=type(cfg.lora)()), source=lambda spec: full[spec.canonical], dtype=dtype)
    rows = batch(cfg)
    return tuple(Policy(m, BatchConfig()).logprobs(rows) for m in (model, plain))


def resumed(cfg: ModelConfig, folder: str, parallel: ParallelConfig = ONE, other: ParallelConfig = ONE) -> dict:
    """Two steps, saved, and two more; and the latter again by a model of layout `other` that loads what was saved."""
    model = build(cfg, parallel, FAST, packed=True, share=False)
    steps(model, 2)
    save_model(model, Path(folder))
    again = build(cfg, other, FAST, packed=True, share=False)
    load_model(again, Path(folder))
    return {"straight": (steps(model, 2), factors(model)), "again": (steps(again, 2), factors(again))}
