"""What the ranks run for test_moe.py."""

from __future__ import annotations

import torch

from aligner.config.schema import BatchConfig, ModelConfig, OptimConfig, ParallelConfig
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from aligner.types import TrainBatch
from tests.megatron.jobs import build, nll_loss, weights
from tests.tiny import batch


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
