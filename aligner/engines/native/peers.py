"""The ranks that share one engine, and their two collectives of a forward pass.

Both give every rank the same bits, so all of them sample the same tokens and no rank needs to lead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import of_each_rank


class EngineRanks:
    """The ranks of one engine. `group` None: this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group if group is not None and group.size() > 1 else None
        self.size = 1 if self.group is None else self.group.size()
        self.rank = 0 if self.group is None else self.group.rank()

    def add(self, x: Tensor) -> Tensor:
        """Return the sum over ranks. On CPU in the order of ranks, so that a row's sum does not depend on its index
        in the batch, as it does in a ring's."""
        if self.group is None:
            return x
        if x.device.type == "cuda":
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
            return x
        first, *rest = of_each_rank(x, self.group)
        for other in rest:
            first += other
        return first

    def join(self, x: Tensor, total: int) -> Tensor:
        """Return [..., n of this rank] -> [..., total]; every rank but the last ones has ceil(total / size)."""
        if self.group is None:
            return x
        width = -(-total // self.size)
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        return torch.cat(of_each_rank(x, self.group), dim=-1)[..., :total]
