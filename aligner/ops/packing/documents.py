"""Rows of several documents -> a row for each. It neither sees the others nor counts its positions from theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.types import RolloutBatch, TrainBatch


@dataclass(frozen=True)
class SourceRows:
    """The rows that parts were taken from. `back` int64 [B, T] is the index of each token's value among the flattened
    ones of the parts; that of padding is one past the last."""

    rows: RolloutBatch | TrainBatch
    back: Tensor

    def join(self, values: Tensor) -> Tensor:
        return _taken(values, self.back)


def split_documents(batch: TrainBatch) -> TrainBatch:
    """Split each stretch of equal numbers in `documents` [B, T] into its own row, right-padded with 0. The batch may
    have only tensors [B, T, ...], and [B] of which a row's documents all take its value. One without `documents` is
    returned unchanged."""
    if batch.documents is None:
        return batch
    count, width = batch.tokens.shape
    row, start, lengths = _spans(batch)
    inside = torch.arange(int(lengths.max())).expand(len(row), -1)
    filled = inside < lengths[:, None]
    index = (row * width + start)[:, None] + inside.where(filled, 0)

    def taken(name: str, values: Tensor) -> Tensor:
        if name == "lengths":
            return lengths
        if values.dim() == 1:
            return values[row]
        assert values.shape[:2] == (count, width), f"{name} {tuple(values.shape)}: expected a value for each token"
        cut = values.flatten(0, 1)[index]
        cut[~filled] = 0
        return cut

    return replace(batch.mapped(taken), documents=None)


def split_forks(rows: RolloutBatch | TrainBatch, mask: Tensor) -> TrainBatch:
    """Return a row for each of the `forks` of a trajectory, with what a model reads of it. A loss finds the original
    rows in `whole`. `mask` [B, T] is the loss mask."""
    wanted = rows.wanted if isinstance(rows, TrainBatch) else None
    batch = TrainBatch(rows.tokens, rows.lengths, mask, wanted=wanted, routing=rows.routing, documents=rows.forks)
    parts = split_documents(batch)
    return replace(parts, whole=SourceRows(rows, _back(batch, parts.tokens.shape[1])))


def join_documents(values: Tensor, batch: TrainBatch) -> Tensor:
    """Return values [rows of `split_documents(batch)`, t, ...] at the positions of the batch's tokens, [B, T, ...]."""
    return values if batch.documents is None else _taken(values, _back(batch, values.shape[1]))


def observed(made: Tensor, lengths: Tensor, forks: Tensor | None) -> Tensor:
    """Return float32 [B, T], 1 on the tokens that a policy read between its responses or behind the last.

    made float32 [B, T]: 1 where the policy generated the token. lengths int64 [B]. forks int64 [B, T]: the segment of a
    trajectory that a token is in. Tokens before a segment's first response are its prompt.
    """
    begun = torch.zeros_like(made)
    for number in [0] if forks is None else forks.unique().tolist():
        inside = torch.ones_like(made) if forks is None else (forks == number).float()
        begun += inside * ((made * inside).cumsum(1) > 0)
    return begun * (1 - made) * (torch.arange(made.shape[1]) < lengths[:, None])


def _begins(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return two bool [B, T]: the first tokens of documents, and all tokens that are no padding."""
    assert batch.documents is not None
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    begins = real.clone()
    begins[:, 1:] &= batch.documents[:, 1:] != batch.documents[:, :-1]
    return begins, real


def _spans(batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return each document's row, first column and length, int64 [documents]."""
    row, start = _begins(batch)[0].nonzero(as_tuple=True)
    ends = torch.cat([start[1:], start.new_zeros(1)])
    last = torch.cat([row[1:] != row[:-1], row.new_ones(1, dtype=torch.bool)])
    return row, start, torch.where(last, batch.lengths[row], ends) - start


def _back(batch: TrainBatch, width: int) -> Tensor:
    """Return `Whole.back` for documents right-padded to `width`."""
    begins, real = _begins(batch)
    row, start, _ = _spans(batch)
    number = begins.flatten().cumsum(0).view_as(begins) - 1
    column = torch.arange(batch.tokens.shape[1]) - start[number.clamp_min(0)]
    return torch.where(real, number * width + column, len(row) * width)


def _taken(values: Tensor, back: Tensor) -> Tensor:
    flat = values.flatten(0, 1)
    return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[back]
