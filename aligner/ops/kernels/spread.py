"""Copies of rows to other positions. The backward is a copy, too, and not a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def spread(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return x[index] [G, ...] of x [N, ...], where x[index][inverse] = x: a permutation and its inverse, or more
    cells than rows. Cells of G that are not in `inverse` hold arbitrary copies: nothing may depend on them (their
    gradient is taken for 0)."""
    return _Spread.apply(x, index, inverse)
