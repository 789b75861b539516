"""This rank's rows of each step of a supervised stage, distributed by cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aligner.data.stream import Stream
from aligner.ops.packing.balance import balance, deal
from aligner.types import ScalarMetrics, TrainBatch


@dataclass
class BatchSource:
    """A source of this rank's rows of the global batches of `stream`.

    Every rank knows all lengths and computes the same shares: equal numbers of rows and, by `cost` (of int64 [n]
    lengths), nearly equal work.
    """

    dataset: Sequence
    stream: Stream
    collate: Callable[[Sequence, int], TrainBatch]
    pad_id: int
    rank: int
    ranks: int
    cost: Callable[[Tensor], Tensor]
    # (items of the whole batch in order, indices of this rank's) -> this rank's items; None: unchanged
    arrange: Callable[[list, Sequence[int]], list] | None = None
    _balance: float = 1.0
    _truncated: float = 0.0

    def next(self) -> TrainBatch:
        rows = self.stream.next()
        cut = np.asarray(self.dataset.report.cut, np.int64)
        self._truncated = float((np.searchsorted(cut, rows, "right") > np.searchsorted(cut, rows)).mean())
        own: Sequence[int] = range(len(rows))
        if self.ranks > 1:
            costs = self.cost(torch.from_numpy(self.dataset.lengths[rows])).tolist()
            shares = deal(costs, self.ranks)
            self._balance = balance(costs, shares)
            own = shares[self.rank]
        if self.arrange is None:
            items = [self.dataset[int(rows[i])] for i in own]
        else:
            items = self.arrange([self.dataset[int(row)] for row in rows], own)
        return self.collate(items, self.pad_id)

    def metrics(self) -> ScalarMetrics:
        """Return batch/balance of the last batch (mean cost of the ranks / largest), the share of its rows on all ranks
        that lost their end, and the stream's metrics."""
        own = {"batch/balance": self._balance, "batch/truncated_fraction": self._truncated}
        return own | self.stream.metrics()
