"""Pairs for multi-token prediction: a token, and the second token behind it, which the layer behind the last predicts
from it and the token between them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aligner.ops.packing.pack import Packing
from aligner.types import TrainBatch

AHEAD = 2  # a row's first tokens, which nothing predicts


def predicted_ahead(batch: TrainBatch) -> Tensor:
    """Return bool [B, T]: the tokens of the loss mask that such a layer can predict."""
    mask = torch.nn.functional.pad(batch.loss_mask, (0, batch.tokens.shape[1] - batch.loss_mask.shape[1])) > 0
    mask[:, :AHEAD] = False
    return mask & (torch.arange(mask.shape[1]) < batch.lengths[:, None])


def two_ahead(packing: Packing, wanted: Tensor) -> Packing:
    """Return the pairs of the stream that predict the tokens `wanted`, bool [B, T], for `to_rows` and `predictions`.
    Attention needs the stream's own packing, in which no rows share their beginning. If this rank has none, one pair
    stays, so that a loss has a graph."""
    size = packing.tokens
    origin = torch.full_like(packing.here, size).view(packing.rows, packing.width)
    origin[:, AHEAD:] = packing.here.view_as(origin)[:, :-AHEAD]
    fresh = wanted & (origin < size)
    outputs, targets = origin[fresh], fresh.flatten().nonzero().flatten()
    count = max(1, len(targets))
    number = torch.full_like(origin, count)
    number[fresh] = torch.arange(len(targets))
    if not len(targets):
        outputs = targets = torch.zeros(1, dtype=torch.int64)
    bare = replace(packing, segments=[], q_index=None, out_index=None, final=None, ragged=None)
    return replace(bare, outputs=outputs, targets=targets, predicted=number.flatten())
