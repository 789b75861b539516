"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import torch
import torch.distributed as dist

import aligner.build
from aligner.cluster.env import RankEnv
from aligner.config.freeze import freeze
from aligner.config.resolve import compose
from aligner.config.validate import validate


def run_stage(arguments: list[str]) -> int:
    """A stage on all ranks of the job, whose process group stays."""
    cfg, world = compose(arguments), dist.get_world_size()
    validate(cfg, world)
    if dist.get_rank() == 0:
        freeze(cfg, cfg.run.dir)
    dist.barrier()
    leave, aligner.build.leave_distributed = aligner.build.leave_distributed, lambda: None
    try:
        return aligner.build.run_stage(cfg, RankEnv(dist.get_rank(), dist.get_rank(), world, world))
    finally:
        aligner.build.leave_distributed = leave
        torch.use_deterministic_algorithms(False)
