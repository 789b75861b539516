"""A loss of one layer, whose gradient begins in the middle of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), device=grad.device)


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x unchanged; backward through it minimises `loss`, a float32 scalar, as well."""
    return _AddLoss.apply(x, loss)
