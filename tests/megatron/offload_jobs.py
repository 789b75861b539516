"""What the ranks run for test_offload.py."""

from __future__ import annotations

import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.model import Head
from aligner.megatron.offload import KINDS, ModelMemory, _optimizer_tensors
from aligner.roles.batching import micro_batches
from tests.megatron.jobs import build, nll_loss, shares
from tests.tiny import batch


def _step(model, seed: int) -> dict:
    full = batch(model.cfg, seed=seed)
    parts = micro_batches(shares(model, full), BatchConfig(micro_batch_samples=8), group=model.layout.pgs.dp)
    return model.step(parts, nll_loss(model, full))


def _bytes(tensors) -> list[bytes]:
    # cloned: what numpy has seen can no longer be freed
    return [t.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def _state(model) -> list[bytes]:
    return _bytes([*model.module.parameters(), *_optimizer_tensors(model.optimizer)])


def round_trip(cfg: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, optim: OptimConfig, score: bool = False):
    """Two models do the same four steps, one of them goes away and comes back before, between and after them."""
    head = Head("score") if score else Head()
    still, moved = (build(cfg, parallel, optim, head, dtype) for _ in range(2))
    memory = ModelMemory(moved)
    out = {"sizes": [], "away": [], "same": [], "metrics": []}
    for seed in range(4):
        before = _state(moved)
        out["sizes"].append({kind: memory.held_bytes(kind) for kind in KINDS})
        left = {kind: memory.leave(kind) for kind in KINDS}
        assert left == out["sizes"][-1], left
        out["away"].append({kind: memory.held_bytes(kind) for kind in KINDS})
        assert not any(memory.leave(kind) for kind in KINDS), "leaving twice"
        back = {kind: memory.come_back(kind) for kind in KINDS}
        assert back == left and not any(memory.come_back(kind) for kind in KINDS), back
        out["same"].append(before == _state(moved))
        out["metrics"].append((_step(still, seed), _step(moved, seed)))
        for kind in ("optimizer", "gradients"):  # weights alone are enough to look at them
            memory.leave(kind)
        weights = [_bytes(m.module.parameters()) for m in (still, moved)]
        for kind in ("optimizer", "gradients"):
            memory.come_back(kind)
        out["same"].append(weights[0] == weights[1] and _state(still) == _state(moved))
    return out


def frozen(cfg: ModelConfig, dtype: torch.dtype):
    """A model without an optimizer: (sizes, while away, equal afterwards)."""
    model = build(cfg, dtype=dtype)
    memory, before = ModelMemory(model), _bytes(model.module.parameters())
    sizes = {kind: memory.leave(kind) for kind in KINDS}
    away = memory.held_bytes("weights")
    for kind in KINDS:
        memory.come_back(kind)
    return sizes, away, before == _bytes(model.module.parameters())
