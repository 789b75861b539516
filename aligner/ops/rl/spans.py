"""Sums over spans: consecutive tokens of a row with the same number above 0, [B, T]."""

from __future__ import annotations

import torch
from torch import Tensor


def last_of_spans(spans: Tensor) -> Tensor:
    """Return bool [B, T]: the last token of each span."""
    return (spans > 0) & (torch.nn.functional.pad(spans[:, 1:], (0, 1)) != spans)


def sums_to_here(x: Tensor, spans: Tensor) -> Tensor:
    """Return the sum of x [B, T] over each token and those before it in its span: at a last token, the span's sum.

    Steps of twice the length each add what their distance adds, so that no sum is a difference of longer ones, and sums
    and gradients do not depend on the order of threads.
    """
    step = 1
    while step < x.shape[1]:
        same = spans[:, step:] == spans[:, :-step]
        x = torch.cat([x[:, :step], x[:, step:] + x[:, :-step].where(same, 0.0)], 1)
        step *= 2
    return x
