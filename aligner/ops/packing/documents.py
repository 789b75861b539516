"""Rows of several documents -> a row for each: it neither sees the others nor counts its positions from theirs."""

from __future__ import annotations

from dataclasses import replace

import torch

from aligner.types import TrainBatch


def apart(batch: TrainBatch) -> TrainBatch:
    """A stretch of equal numbers in `documents` [B, T] becomes a row of its own, right-padded with 0. Only tensors [B,
    T, ...] may be there beside the lengths. A batch without `documents` stays as it is."""
    if batch.documents is None:
        return batch
    count, width = batch.tokens.shape
    cells = torch.arange(width).expand(count, width)
    real = cells < batch.lengths[:, None]
    begins = real.clone()
    begins[:, 1:] &= batch.documents[:, 1:] != batch.documents[:, :-1]
    row, start = begins.nonzero(as_tuple=True)
    ends = torch.cat([start[1:], start.new_zeros(1)])
    last = torch.cat([row[1:] != row[:-1], row.new_ones(1, dtype=torch.bool)])
    lengths = torch.where(last, batch.lengths[row], ends) - start
    inside = torch.arange(int(lengths.max())).expand(len(row), -1)
    filled = inside < lengths[:, None]
    index = (row * width + start)[:, None] + inside.where(filled, 0)
    found = {"lengths": lengths}
    for name, values in batch.tensors().items():
        if name != "lengths":
            assert values.shape[:2] == (count, width), f"{name} {tuple(values.shape)}: expected a value for each token"
            found[name] = values.flatten(0, 1)[index]
            found[name][~filled] = 0
    return replace(batch, **found | {"documents": None})


def together(values: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """Values [rows of `apart(batch)`, t, ...] back in the places of the batch's tokens, [B, T, ...]."""
    if batch.documents is None:
        return values
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    filled = torch.arange(values.shape[1]) < apart(batch).lengths[:, None]
    found = values.new_zeros(*batch.tokens.shape, *values.shape[2:])
    found[real] = values[filled]
    return found
