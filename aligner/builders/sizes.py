"""Values for `auto`: those of the run's previous start, else those that this job's memory allows. Every rank gets the
same. The run's record keeps them, so that each further start computes the same bit-for-bit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch

from aligner.cluster.env import RankEnv
from aligner.cluster.node_memory import node_bytes
from aligner.config.derived import undecided
from aligner.config.freeze import FILE_NAME, PENDING_NAME, freeze, load_frozen
from aligner.config.schema import Config
from aligner.errors import AlignerError
from aligner.megatron.model import te_kinds
from aligner.ops.agree import by_rank_0
from aligner.ops.reduce import gathered
from aligner.plan.sizing import KEYS, Room, sized, taken_over


def decide(cfg: Config, env: RankEnv, device: torch.device) -> str:
    """Set the keys that are `auto` in `cfg`. Returns a line about it; "" if there were none. Collective over the
    world."""
    if not undecided(cfg):
        return ""
    each = gathered(memory_bytes(device, env.local_world_size))
    trainers = len(each) - cfg.engine.ranks
    room = Room(min(each[:trainers]), min(each[trainers:] or each), device.type == "cuda")

    def chosen() -> Config:
        earlier = _earlier(cfg)
        known = cfg if earlier is None else taken_over(cfg, earlier)
        kernels = "te" if te_kinds(cfg.model).get("attention") == "" else "own"
        varlen = known.model.varlen_attention if room.cuda else False
        model = replace(known.model, kernels=kernels, varlen_attention=varlen)
        settled = sized(replace(known, model=model), env.world_size, room)
        _keep(settled)
        return settled

    settled = by_rank_0(chosen)
    line = _line(cfg, settled)
    cfg.batch, cfg.engine = settled.batch, settled.engine
    return line


def memory_bytes(device: torch.device, local_ranks: int) -> int:
    """Return the memory of a rank: its GPU's, or its share of the node's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return node_bytes() // local_ranks


def _earlier(cfg: Config) -> Config | None:
    """Return the record of the resumed run, else of the one whose checkpoint it begins with."""
    if cfg.run.resume == "never":
        return None
    folders = [Path(cfg.run.dir)]
    if cfg.run.resume != "auto":
        start = Path(cfg.run.resume).expanduser().absolute()
        folders += [start, *start.parents[:3]]
    for folder in folders:
        with suppress(AlignerError):  # no record, or one of a version with other keys
            if (folder / FILE_NAME).is_file() and not undecided(record := load_frozen(folder)):
                return record
    return None


def _keep(sizes: Config) -> None:
    """Write the sizes into this start's config.yaml, if it has one."""
    folder = Path(sizes.run.dir)
    name = next((name for name in (PENDING_NAME, FILE_NAME) if (folder / name).is_file()), "")
    if name:
        record = load_frozen(folder / name)
        record.batch, record.engine = sizes.batch, sizes.engine
        freeze(record, folder, name)


def _line(before: Config, settled: Config) -> str:
    """Describe the values that were `auto`."""
    values = {key: attrgetter(key)(settled) for key in KEYS if attrgetter(key)(settled) != attrgetter(key)(before)}
    return f"sizes for auto: {' '.join(f'{key}={value}' for key, value in values.items() if value)}"
