"""What the ranks run for test_ema.py."""

from __future__ import annotations

from pathlib import Path

import torch

from aligner.config.schema import BatchConfig, ModelConfig, ParallelConfig
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.ema import Ema
from aligner.megatron.offload import ModelMemory
from aligner.roles.batching import micro_batches
from tests.megatron.jobs import build, nll_loss, weights
from tests.megatron.moe_jobs import equal_shares
from tests.tiny import batch, wild_source


def _step(model, cfg: ModelConfig) -> None:
    full = batch(cfg)
    model.step(micro_batches(equal_shares(model, full), BatchConfig()), nll_loss(model, full))


def _mean(model) -> dict[str, torch.Tensor]:
    with model.ema.in_place():
        return weights(model)


def train(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, decay: float = 0.75, **kwargs) -> dict:
    """The weights before each step and after the last, and their mean; saved before the last step."""
    model = build(cfg, parallel, **kwargs)
    model.ema = Ema(model, decay)
    each = [weights(model)]
    for step in range(3):
        if step == 2:
            save_model(model, folder)
        _step(model, cfg)
        each.append(weights(model))
    out = {"each": each, "mean": _mean(model), "own": weights(model), "bytes": sum(m.nbytes for m in model.ema.means)}
    with_it, model.ema = ModelMemory(model).held_bytes("optimizer"), None
    return out | {"leaves": with_it - ModelMemory(model).held_bytes("optimizer"), "stage": model.layout.pp_rank}


def go_on(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, decay: float = 0.75, **kwargs) -> dict:
    """From the checkpoint, the last step: mean before it and after."""
    model = build(cfg, parallel, source=wild_source(cfg, seed=7), **kwargs)
    model.ema = Ema(model, decay)
    load_model(model, folder)
    loaded = _mean(model)
    _step(model, cfg)
    return {"loaded": loaded, "mean": _mean(model), "own": weights(model)}


def begin(folder: Path, cfg: ModelConfig, **kwargs) -> dict:
    """From a checkpoint of a model without a mean."""
    first = build(cfg, **kwargs)
    _step(first, cfg)
    save_model(first, folder)
    model = build(cfg, source=wild_source(cfg, seed=7), **kwargs)
    model.ema = Ema(model, 0.5)
    load_model(model, folder)
    return {"mean": _mean(model), "own": weights(first)}
