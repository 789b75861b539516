"""What `mpirun` starts for test_pull.py: the ranks of one job, as `aligner run` would join them.

mpirun -n 3 python -m tests.refit.window_ranks FOLDER     FOLDER/RANK: what each case told
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from aligner.cluster.mpi import join
from aligner.errors import RefitError
from aligner.megatron.groups import init_distributed
from aligner.models.shards import hf_tensors
from aligner.refit.exchange import Exchange
from aligner.refit.plan import plan_refit
from aligner.refit.pull import Pull
from tests.refit.jobs import followed, shards
from tests.refit.test_changes import CASES

NAMES = [name for name, (world, *_) in CASES.items() if world <= 3]


def late(rank: int) -> str:
    """The last rank does not come before the others have ended; what these are told."""
    _, cfg, trainer, engines, dtype = CASES["one to two others"]
    plan = plan_refit(trainer, engines, hf_tensors(cfg), dtype.itemsize, 5000)
    exchange = Exchange(plan, rank, torch.device("cpu"), dtype, 1.0)
    exchange.pull = Pull(exchange)
    if rank == 2:
        return ""
    try:
        exchange(shards(cfg, trainer, rank), None)
    except RefitError as error:
        return str(error)
    return "no error"


def main(folder: Path) -> None:
    world = join()
    init_distributed(world.env, "gloo", 600.0, lambda: b"of the tests' ranks")
    told: dict = {}
    for name in NAMES:
        _, cfg, trainer, engines, dtype = CASES[name]
        told[name] = followed(cfg, trainer, engines, dtype, "mpi_window")
    told["late"] = late(world.env.rank)
    torch.save(told, folder / str(world.env.rank))
    torch.distributed.barrier()
    os._exit(0)  # MPI waits for ranks that are late


if __name__ == "__main__":
    main(Path(sys.argv[1]))
