"""The samples that are in flight by the token clock (`rollout/clock.py`), and the file that they are in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from aligner.models.safetensors_io import save_whole
from aligner.ops.packing.routing import widened
from aligner.ops.packing.rows import joined
from aligner.rollout.parts import Parts
from aligner.types import STOP, Generations


@dataclass(frozen=True)
class Whole(Parts):
    """Of one part each, which global rank 0 writes and all ranks read."""

    @property
    def mine(self) -> range:
        return range(1)

    @property
    def part(self) -> tuple[int, int]:
        return 0, 1


@dataclass
class Bank:
    """Samples in flight, `group` rows to each of the groups `numbers`, which ascend."""

    group: int
    numbers: list[int]
    rows: Generations  # as far as they are; with versions
    ended: Tensor  # int64 [N] window in which each ended, 0 while it has not

    def ready(self) -> list[int]:
        """Places of the groups that are whole, in the order in which they are trained on."""
        ends = self.ended.view(-1, self.group)
        last = torch.where((ends > 0).all(1), ends.amax(1), 0).tolist() if len(ends) else []
        return sorted((place for place, window in enumerate(last) if window), key=lambda place: (last[place], place))

    def take(self, places: list[int]) -> Bank:
        rows = torch.tensor([place * self.group + i for place in places for i in range(self.group)], dtype=torch.int64)
        return Bank(self.group, [self.numbers[p] for p in places], self.rows.select(rows).trim(), self.ended[rows])

    def add(self, other: Bank) -> Bank:
        rows, ended = joined([self.rows, other.rows]), torch.cat([self.ended, other.ended])
        return Bank(self.group, self.numbers + other.numbers, rows, ended)

    def merge(self, rows: Tensor, found: Generations, window: int, version: int, limit: int) -> None:
        """What a window made of `rows` int64 [n]."""
        width = max(self.rows.tokens.shape[1], found.tokens.shape[1])
        mine = {n: widened(t, width, 0) if t.dim() == 2 else t.clone() for n, t in self.rows.tensors().items()}
        made = {n: widened(t, width, 0) if t.dim() == 2 else t for n, t in found.tensors().items()}
        made["versions"] = torch.full_like(made["tokens"], version)
        begun, column = mine["lengths"][rows], torch.arange(width)
        made["lengths"] = torch.maximum(begun, made["lengths"])  # 0 of one that had no slot
        new = (column >= begun[:, None]) & (column < made["lengths"][:, None])
        for name, t in mine.items():
            t[rows] = torch.where(new, made[name], t[rows]) if t.dim() == 2 else made[name]
        self.rows = replace(self.rows, **mine)
        self.ended[rows] = torch.where((made["finish_reason"] == STOP) | (made["lengths"] >= limit), window, 0)


def write_bank(bank: Bank, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole(path, bank.rows.tensors() | {"ended": bank.ended}, {})


def read_bank(bank: Bank, path: Path, held: range, wanted: range) -> Bank:
    """What was written of the same groups."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ended = found.pop("ended")
    return replace(bank, rows=replace(bank.rows, **found), ended=ended)
