"""Rows put together, of numbers and of batches."""

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
    """[N, longest] of N rows of numbers (arrays are read without a look at each), with 0 behind the shorter ones."""
    rows = [torch.as_tensor(np.asarray(row), dtype=dtype) for row in values]
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=dtype)


def joined[Batch: TensorBatch](parts: Sequence[Batch], pad_id: int = 0) -> Batch:
    """The rows of all parts in order; what has columns is padded to the longest, tokens with `pad_id`."""

    def column(name: str) -> Tensor:
        found = [part.tensors()[name] for part in parts]
        if found[0].dim() < 2:
            return torch.cat(found)
        width = max(t.shape[1] for t in found)
        return torch.cat([widened(t, width, pad_id if name == "tokens" else 0) for t in found])

    return replace(parts[0], **{name: column(name) for name in parts[0].tensors()})
