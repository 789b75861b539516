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
    # (items of the whole batch in their order, places of this rank's) -> this rank's; None: as they are
    arrange: Callable[[list, Sequence[int]], list] | None = None
    _balance: float = 1.0

    def next(self) -> TrainBatch:
        rows = self.stream.next()
        mine: Sequence[int] = range(len(rows))
        if self.ranks > 1:
            costs = self.cost(torch.from_numpy(self.dataset.lengths[rows])).tolist()
            parts = deal(costs, self.ranks)
            self._balance = balance(costs, parts)
            mine = parts[self.rank]
        if self.arrange is None:
            items = [self.dataset[int(rows[i])] for i in mine]
        else:
            items = self.arrange([self.dataset[int(row)] for row in rows], mine)
        return self.collate(items, self.pad_id)

    def metrics(self) -> ScalarMetrics:
        """batch/balance of the last batch: mean cost of the ranks over the largest; and the stream's."""
        return {"batch/balance": self._balance} | self.stream.metrics()
