"""Ranks of a job that differ from each other. Imports no torch.

Ranks from 0 on train, the last `engine.ranks` only generate.
"""

from __future__ import annotations

from itertools import product

from aligner.config.schema import Config
from aligner.errors import ConfigError


def chosen(which: str, cfg: Config, gpus: int) -> list[int]:
    """Return the ranks to rehearse, each after the one whose messages it reads (`source_of`). Raises ConfigError."""
    p = cfg.parallel
    trainers = gpus - cfg.engine.ranks
    data = trainers // p.model_size

    def rank(stage: int, data_rank: int, context: int, tensor: int) -> int:
        """Return a rank's number, as `megatron.groups.build_layout` counts: tensor fastest, then context, data,
        pipeline."""
        return ((stage * data + data_rank) * p.context + context) * p.tensor + tensor

    if which == "stages":
        ranks = {rank(stage, 0, 0, 0) for stage in range(p.pipeline)} | set(range(trainers, gpus)[:1])
    elif which == "all-distinct":
        ends = [sorted({0, size - 1}) for size in (data, p.context, p.tensor)]
        ranks = {rank(*coordinates) for coordinates in product(range(p.pipeline), *ends)}
        ranks |= {trainers, gpus - 1} if cfg.engine.ranks else set()
    else:
        numbers = which.split(",")
        if not all(number.isdecimal() and int(number) < gpus for number in numbers):
            raise ConfigError("--ranks", which, f"stages, all-distinct, or numbers from 0 to {gpus - 1} with commas")
        ranks = {int(number) for number in numbers}
        for _ in range(2):  # a rank that generates reads from rank 0, which reads from another one
            ranks |= {source_of(number, cfg, gpus) for number in ranks}

    def turn(number: int) -> tuple[bool, bool, int]:
        return number >= trainers, number != source_of(number, cfg, gpus), number

    return sorted(ranks, key=turn)


def stage_of(rank: int, cfg: Config, gpus: int) -> int | None:
    """Return the pipeline stage of a rank; None: it only generates."""
    trainers = gpus - cfg.engine.ranks
    return rank * cfg.parallel.pipeline // trainers if rank < trainers else None


def source_of(rank: int, cfg: Config, gpus: int) -> int:
    """Return the rank that sends to `rank` what it cannot know: its peer on the last stage the metrics, rank 0 the
    orders."""
    trainers = gpus - cfg.engine.ranks
    each = trainers // cfg.parallel.pipeline
    return rank % each + trainers - each if rank < trainers else 0
