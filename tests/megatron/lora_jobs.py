"""What the ranks run for `test_lora`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from aligner.config.schema import BatchConfig, ParallelConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.sections.optim import OptimConfig
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import gather_weights
from aligner.models.adapters import adapter_table
from aligner.models.families import family_table
from aligner.models.params import to_hf
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


def gradients(cfg: ModelConfig) -> dict:
    """By Hugging Face's names: factors that are not their first, W beside them, the gradient of each factor, and that
    of the same numbers as whole weights of a model without adapters. Gradients: what one step of SGD subtracts."""
    model = build(cfg, ONE, SGD, packed=True, share=False)
    shake(model, 0.1)
    before, full = in_files(model), merged(model)
    steps(model, 1)
    plain = build(replace(cfg, lora=LoraConfig()), ONE, SGD, source=lambda spec: full[spec.canonical], share=False)
    whole = weights(plain)
    steps(plain, 1)
    return {
        "factors": before,
        "of_factors": {name: before[name] - t for name, t in in_files(model).items()},
        "base": weights(build(replace(cfg, lora=LoraConfig()))),
        "of_weights": {name: whole[name] - t for name, t in weights(plain).items()},
    }


def in_files(model: ShardedModel) -> dict[str, torch.Tensor]:
    """The factors of one rank by their names in files."""
    rows = {spec.canonical: spec for spec in adapter_table(model.cfg)}
    found = (to_hf(rows[name], t, model.cfg) for name, t in factors(model).items())
    return {name: t for tensors in found for name, t in tensors.items()}


def merged(model: ShardedModel) -> dict[str, torch.Tensor]:
    """By canonical names, in float32. Collective over tensor and expert ranks."""
    table = family_table(model.cfg, model.head.kind, model.head.outputs)
    return {spec.canonical: t.float().clone() for spec, t in gather_weights(table, model.weights(), model.layout)}


@torch.no_grad()
def shake(model: ShardedModel, size: float) -> None:
    for spec, param in model.adapted.named():
        g = torch.Generator().manual_seed(len(spec.canonical) + sum(map(ord, spec.canonical)))
        param.add_(size * torch.randn(param.shape, generator=g))
    model.optimizer.reload_model_params()


def merged_is_adapted(cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of trained adapters, and of a plain model with the merged weights."""
    model = build(cfg, ONE, FAST, dtype=dtype)
    steps(model, 3, BatchConfig())
    shake(model, 0.1)
    full = merged(model)
    plain = build(replace(cfg, lora=LoraConfig()), source=lambda spec: full[spec.canonical], dtype=dtype)
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
