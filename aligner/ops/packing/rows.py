"""Rows of numbers and of batches, joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.ops.packing.routing import widened
from aligner.types import TensorBatch


def column(values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return [N, longest] of N rows of numbers, padded with 0. Arrays are read at once, not number by number."""
    rows = [torch.as_tensor(np.asarray(row), dtype=dtype) for row in values]
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=dtype)


def joined[Batch: TensorBatch](parts: Sequence[Batch], pad_id: int = 0) -> Batch:
    """Join the rows of all parts in order; tensors with columns are padded to the longest, tokens with `pad_id`."""

    def column(name: str) -> Tensor:
        columns = [rows.tensors()[name] for rows in parts]
        if columns[0].dim() < 2:
            return torch.cat(columns)
        width = max(t.shape[1] for t in columns)
        return torch.cat([widened(t, width, pad_id if name == "tokens" else 0) for t in columns])

    return replace(parts[0], **{name: column(name) for name in parts[0].tensors()})
