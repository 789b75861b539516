"""Sums over spans: consecutive tokens of a row with the same number above 0, [B, T]."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import gathered


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


def means_of_numbers(x: Tensor, numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return float32 [B, T]: for each element with a number above 0 the mean of x over those with this number, in the
    rows of all ranks of `group`; 0 elsewhere."""
    count = torch.bincount(numbers.flatten()).double()
    parts = gathered((torch.bincount(numbers.flatten(), x.flatten().double()), count), group)
    width = max(len(count) for _, count in parts)
    sums, counts = (
        sum(torch.nn.functional.pad(each, (0, width - len(each))) for each in side) for side in zip(*parts, strict=True)
    )
    means = (sums / counts.clamp(min=1)).float()
    means[0] = 0.0
    return means[numbers]
