"""The only place where samples change their data-parallel rank: after group statistics are taken, before the update.

A minibatch has the same members for any number of ranks; here the ranks only agree on who computes which row, so that
none waits long for the others. Losses, gradients and metrics do not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.ops.packing.balance import balance, deal, row_costs
from aligner.ops.packing.routing import widened
from aligner.ops.reduce import of_each_rank
from aligner.types import ScalarMetrics, TrainBatch

ENOUGH = 0.98  # evenness of the ranks' costs (mean over largest) from which rows stay on their ranks


@dataclass
class Balancer:
    """A balancer that deals the rows of a minibatch to the ranks of `group` by their cost in `model`; all ranks hold
    equally many."""

    model: ModelConfig
    group: dist.ProcessGroup
    on: bool = True
    _before: list[float] = field(default_factory=list)
    _after: list[float] = field(default_factory=list)

    def __call__(self, minibatch: TrainBatch) -> TrainBatch:
        """Return this rank's rows of the balanced minibatch. Collective over `group`."""
        ranks = self.group.size()
        if ranks == 1:
            self._note(1.0, 1.0)
            return minibatch
        lengths = torch.cat(of_each_rank(minibatch.lengths, self.group))
        count = len(minibatch.lengths)
        costs = row_costs(lengths, self.model).tolist()
        parts = [list(range(rank * count, (rank + 1) * count)) for rank in range(ranks)]
        before = balance(costs, parts)
        if not self.on or before >= ENOUGH:
            self._note(before, before)
            return minibatch
        parts = deal(costs, ranks)
        self._note(before, balance(costs, parts))
        return _exchange(minibatch, parts, int(lengths.max()), self.group)

    def _note(self, before: float, after: float) -> None:
        self._before.append(before)
        self._after.append(after)

    def metrics(self) -> ScalarMetrics:
        """Return batch/balance (mean cost of the ranks over the largest; 1: no rank waits) of the minibatches since
        the last call, and batch/balance_before, its value without an exchange."""
        metrics = {
            name: sum(values) / len(values)
            for name, values in (("batch/balance", self._after), ("batch/balance_before", self._before))
            if values
        }
        self._before, self._after = [], []
        return metrics


def _exchange(minibatch: TrainBatch, parts: list[list[int]], width: int, group: dist.ProcessGroup) -> TrainBatch:
    """Exchange rows, given by their number over all ranks (rank-major, equally many each); return this rank's share,
    in ascending order."""
    count, me = len(minibatch.lengths), group.rank()
    own = range(me * count, (me + 1) * count)
    sent = [[row - own.start for row in share if row in own] for share in parts]
    received = [sum(rank * count <= row < (rank + 1) * count for row in parts[me]) for rank in range(group.size())]
    order = torch.tensor([row for rows in sent for row in rows], dtype=torch.int64)

    def moved(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() >= 2:  # per token: cut or pad to the width of the whole minibatch
            tensor = widened(tensor, width)
        source = tensor.index_select(0, order).contiguous()
        if name == "routing":
            source = source.view(torch.uint8)  # gloo does not know int16
        out = source.new_empty(sum(received), *source.shape[1:])
        dist.all_to_all_single(out, source, received, [len(rows) for rows in sent], group=group)
        return out.view(tensor.dtype)

    return minibatch.mapped(moved)
