"""A rank of `aligner check layouts`: computes all cases of its number of ranks, one after the other.

python -m aligner.tools.layouts.ranks FOLDER     (started by `check.py`)
"""

from __future__ import annotations

import gc
import pickle
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from aligner.cluster.env import rank_env
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.megatron.groups import init_distributed, leave_distributed
from aligner.tools.layouts.cases import LayoutCase
from aligner.tools.layouts.replay import gradients

JOBS = "jobs.pickle"
TIMEOUT_S = 300.0


class LayoutJob(NamedTuple):
    """A case to compute, and the file for what comes out."""

    case: LayoutCase
    kind: str
    algorithm: AlgorithmConfig
    temperature: float
    file: str


def main(folder: Path) -> None:
    env = rank_env()
    init_distributed(env, "auto", TIMEOUT_S, folder)
    for job in pickle.loads((folder / JOBS).read_bytes()):
        if job.case.world == env.world_size:
            result = gradients(job.case, job.kind, job.algorithm, job.temperature)
            if env.rank == 0:
                torch.save(result, folder / job.file)
            gc.collect()  # a model in reference cycles keeps its buffers
    leave_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
