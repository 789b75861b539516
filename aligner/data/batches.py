"""This rank's rows of each step of a supervised stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aligner.data.stream import IndexStream
from aligner.types import TrainBatch


@dataclass
class BatchSource:
    """Global batches of `stream`; data-parallel rank r of n takes rows r, r+n, r+2n, ... of each."""

    dataset: Sequence
    stream: IndexStream
    collate: Callable[[Sequence, int], TrainBatch]
    pad_id: int
    rank: int
    ranks: int

    def next(self) -> TrainBatch:
        rows = self.stream.next()[self.rank :: self.ranks]
        return self.collate([self.dataset[int(row)] for row in rows], self.pad_id)
