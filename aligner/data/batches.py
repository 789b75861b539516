"""This rank's rows of each step of a supervised stage, dealt by cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.data.stream import Stream
from aligner.ops.packing.balance import balance, deal
from aligner.types import ScalarMetrics, TrainBatch


@dataclass
class BatchSource:
    """Global batches of `stream`. Every rank knows all lengths, so each works out by itself who takes which rows: of
    equal number and, by `cost` (of int64 [n] lengths), of nearly equal work."""

    dataset: Sequence
    stream: Stream
    collate: Callable[[Sequence, int], TrainBatch]
    pad_id: int
    rank: int
    ranks: int
    cost: Callable[[Tensor], Tensor]
    _balance: float = 1.0

    def next(self) -> TrainBatch:
        rows = self.stream.next()
        if self.ranks > 1:
            costs = self.cost(torch.from_numpy(self.dataset.lengths[rows])).tolist()
            parts = deal(costs, self.ranks)
            self._balance = balance(costs, parts)
            rows = rows[parts[self.rank]]
        return self.collate([self.dataset[int(row)] for row in rows], self.pad_id)

    def metrics(self) -> ScalarMetrics:
        """batch/balance of the last batch: mean cost of the ranks over the largest; and the stream's."""
        return {"batch/balance": self._balance} | self.stream.metrics()
