"""Which ranks of a job differ from each other. Imports no torch."""

from __future__ import annotations

from itertools import product

from aligner.config.schema import Config
from aligner.errors import ConfigError


def chosen(which: str, cfg: Config, gpus: int) -> list[int]:
    """Those of the last pipeline stage first: others are told their metrics. Raises ConfigError."""
    p = cfg.parallel
    data = gpus // p.model_size

    def rank(stage: int, data_rank: int, context: int, tensor: int) -> int:
        """As `megatron.groups.build_layout` counts: tensor fastest, then context, data, pipeline."""
        return ((stage * data + data_rank) * p.context + context) * p.tensor + tensor

    if which == "stages":
        found = {rank(stage, 0, 0, 0) for stage in range(p.pipeline)}
    elif which == "all-distinct":
        ends = [sorted({0, size - 1}) for size in (data, p.context, p.tensor)]
        found = {rank(*place) for place in product(range(p.pipeline), *ends)}
    else:
        numbers = which.split(",")
        if not all(number.isdecimal() and int(number) < gpus for number in numbers):
            raise ConfigError("--ranks", which, f"stages, all-distinct, or numbers from 0 to {gpus - 1} with commas")
        found = {int(number) for number in numbers}
        found |= {last_stage_peer(number, cfg, gpus) for number in found}
    return sorted(found, key=lambda number: (number != last_stage_peer(number, cfg, gpus), number))


def stage_of(rank: int, cfg: Config, gpus: int) -> int:
    return rank * cfg.parallel.pipeline // gpus


def last_stage_peer(rank: int, cfg: Config, gpus: int) -> int:
    each = gpus // cfg.parallel.pipeline
    return rank % each + gpus - each
