"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import torch.distributed as dist

from aligner.config.sections.model.config import ModelConfig
from aligner.rollout.balance import Balancer
from aligner.types import TrainBatch


def balanced(model: ModelConfig, shares: list[TrainBatch], on: bool):
    balancer = Balancer(model, dist.group.WORLD, on)
    batch = balancer(shares[dist.get_rank()])
    return batch, balancer.metrics()
