"""What the ranks run for test_adam.py."""

from __future__ import annotations

from pathlib import Path

import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.megatron.checkpoint import load_model, save_model
from aligner.roles.batching import micro_batches
from tests.megatron.jobs import ONE, build, nll_loss, weights
from tests.tiny import batch, wild_source


def _inner(model) -> list[torch.optim.Optimizer]:
    parts = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    return [part.optimizer for part in parts]


class Twin:
    """AdamW in float64 (arXiv:1711.05101, algorithm 2), on the gradients that torch's gets."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.state = [[(p.detach().double().clone(), 0.0, 0.0) for p in g["params"]] for g in optimizer.param_groups]
        optimizer.register_step_pre_hook(lambda *unused: self.step())

    def step(self) -> None:
        self.steps += 1
        for group, state in zip(self.optimizer.param_groups, self.state, strict=True):
            lr, decay, eps, (b1, b2) = (group[name] for name in ("lr", "weight_decay", "eps", "betas"))
            for i, (p, (x, m, v)) in enumerate(zip(group["params"], state, strict=True)):
                grad = p.grad.double()
                m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad.square()
                move = (m / (1 - b1**self.steps)) / ((v / (1 - b2**self.steps)).sqrt() + eps)
                state[i] = x - lr * (move + decay * x), m, v

    def gap(self) -> float:
        """Largest difference of a parameter or moment, in roundings of float32 of the largest number beside it."""
        worst = 0.0
        for group, state in zip(self.optimizer.param_groups, self.state, strict=True):
            for p, wanted in zip(group["params"], state, strict=True):
                mine = self.optimizer.state[p]
                for a, b in zip((p.detach(), mine["exp_avg"], mine["exp_avg_sq"]), wanted, strict=True):
                    worst = max(worst, float((a - b).abs().max() / b.abs().max()) * 2**24)
        return worst


def _step(model, full) -> None:
    model.step(micro_batches(full, BatchConfig()), nll_loss(model, full))


def against_float64(cfg: ModelConfig, optim: OptimConfig, dtype: torch.dtype, steps: int) -> dict:
    model, full = build(cfg, ONE, optim, dtype=dtype), batch(cfg)
    twins = [Twin(optimizer) for optimizer in _inner(model)]
    for _ in range(steps):
        _step(model, full)
    return {
        "gap": max(twin.gap() for twin in twins),
        "fused": [group["fused"] for twin in twins for group in twin.optimizer.param_groups],
        "steps": {float(state["step"]) for twin in twins for state in twin.optimizer.state.values()},
    }


def from_one_that_was_not_fused(folder: Path, cfg: ModelConfig, optim: OptimConfig, dtype: torch.dtype) -> dict:
    """Two steps of torch's default Adam and a checkpoint; then one more, there and by a model that loads it."""
    first, full = build(cfg, ONE, optim, dtype=dtype), batch(cfg)
    for optimizer in _inner(first):
        for group in optimizer.param_groups:
            group["fused"] = None
    for _ in range(2):
        _step(first, full)
    save_model(first, folder)
    second = build(cfg, ONE, optim, dtype=dtype, source=wild_source(cfg, seed=7))
    load_model(second, folder)
    loaded = weights(first), weights(second)
    _step(first, full)
    _step(second, full)
    states = [(p, s["step"]) for optimizer in _inner(second) for p, s in optimizer.state.items()]
    return {
        "loaded": loaded,
        "stepped": (weights(first), weights(second)),
        "fused": [group["fused"] for optimizer in _inner(second) for group in optimizer.param_groups],
        "steps": {(float(step), step.dtype, step.device == p.device) for p, step in states},
        "shared": len(states) - len({step.data_ptr() for _, step in states}),
    }
