"""What the ranks run for `test_held`."""

from __future__ import annotations

from dataclasses import replace

import torch

from aligner.config.schema import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.megatron.offload import ModelMemory
from aligner.models.adapters import held_sites
from aligner.ops.kernels.frozen import Frozen
from aligner.roles.batching import micro_batches
from tests.megatron.jobs import ONE, build, nll_loss, shares, weights
from tests.tiny import ADAM, batch, wild_source

ROWS = BatchConfig(share_prompts=False)


def rounded(cfg: ModelConfig):
    """Weights in full precision that are what `cfg` holds of others."""
    wild, kind = wild_source(cfg), cfg.lora.quantize_base
    held = {site.base.canonical for site in held_sites(cfg)}

    def source(spec):
        full = wild(spec)
        return Frozen.of(full, kind).dense(torch.float32) if spec.canonical in held else full

    return source


def train(cfg: ModelConfig, parallel=ONE, plain: bool = False, dtype: torch.dtype = torch.float32) -> dict:
    """Three steps; `plain`: beside weights in full precision that are the same numbers."""
    source = rounded(cfg) if plain else wild_source(cfg)
    used = replace(cfg, lora=replace(cfg.lora, quantize_base="none")) if plain else cfg
    model = build(used, parallel, ADAM, source=source, dtype=dtype)
    memory, full = ModelMemory(model), batch(cfg)
    mine, loss = shares(model, full), nll_loss(model, full)
    metrics = [model.step(micro_batches(mine, ROWS), loss) for _ in range(2)]
    memory.leave("weights")
    memory.come_back("weights")
    metrics += [model.step(micro_batches(mine, ROWS), loss)]
    return {"metrics": metrics, "weights": weights(model), "bytes": memory.held_bytes("weights")}
