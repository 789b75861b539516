"""Reductions over a process group, where None means: this process alone."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of `x` over `group`, in place where there is one. No gradient flows through it."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def max_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Maximum of `x` over `group`, in place where there is one. No gradient flows through it."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x
