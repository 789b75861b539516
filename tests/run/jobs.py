"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import torch
import torch.distributed as dist

import aligner.build
import aligner.builders.job
import aligner.megatron.checkpoint
import aligner.roles.model_init
import aligner.run.checkpoints
from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.config.freeze import freeze
from aligner.config.resolve import compose
from aligner.config.schema import Config
from aligner.config.validate import validate
from aligner.rollout import requests
from tests.stages import PowerCut, power_cut_in_update


def run_stage(arguments: list[str], signals: StopSignals | None = None) -> int:
    """A stage on all ranks of the job, whose process group stays."""
    return run_config(compose(arguments), signals)


def run_config(cfg: Config, signals: StopSignals | None = None) -> int:
    world = dist.get_world_size()
    validate(cfg, world)
    if dist.get_rank() == 0:
        freeze(cfg, cfg.run.dir)
    dist.barrier()
    homes = (aligner.build, aligner.builders.job)
    leave = aligner.build.leave_distributed
    for home in homes:
        home.leave_distributed = lambda: None
    try:
        return aligner.build.run_stage(cfg, RankEnv(dist.get_rank(), dist.get_rank(), world, world), signals)
    finally:
        for home in homes:
            home.leave_distributed = leave
        torch.use_deterministic_algorithms(False)


def cut_in_update(arguments: list[str], step: int) -> bool:
    """`run_stage` until the power goes off on all ranks in the first update of `step`."""
    try:
        with power_cut_in_update(step):
            run_stage(arguments)
    except PowerCut:
        dist.barrier()
        return True
    return False


def seeds_of(arguments: list[str]) -> set[tuple[int, int, int, int]]:
    """`run_stage`; (step, prompt, sample, seed) of all requests of training that this rank made."""
    made: set[tuple[int, int, int, int]] = set()
    original = requests.request_seed

    def noted(seed: int, step: int, prompt: int, sample: int) -> int:
        made.add((step, prompt, sample, original(seed, step, prompt, sample)))
        return original(seed, step, prompt, sample)

    requests.request_seed = noted
    try:
        run_stage(arguments)
    finally:
        requests.request_seed = original
    return made
