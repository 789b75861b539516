"""Hashes of tensors' bits that add up: of the parts of a tensor, in any order, on any device.

An element counts with its bits times an odd 64-bit number for its row and one for its column, modulo 2^64. One element
that changes always shows; several hide each other with a chance of at most 2^-33 (two that lose their sign). On one
core of a CPU that takes 1 ns for each number, `checksum.py`, which mixes each of them, 60: cheap enough for the weights
of every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aligner.ops.kernels.checksum import mix64_
from aligner.ops.seeds import scatter

_CHUNK = {"cpu": 1 << 16}  # elements at once: products that stay in a core's cache take an eighth of the time
_MOST = 1 << 24  # elsewhere: 128 MiB of them
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def odd_numbers(what: int, indices: np.ndarray) -> Tensor:
    """int64: of each index an odd number, drawn for `what`."""
    return torch.from_numpy((scatter(what, indices) | np.uint64(1)).view(np.int64))


def bits(t: Tensor) -> Tensor:
    """Its elements as integers of their size. (bool: as bytes.)"""
    t = t.detach()
    return t.view(torch.uint8) if t.dtype == torch.bool else t.view(_INTS[t.element_size()])


def part_hash(part: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """int64 []: of a contiguous `part` that is, in row-major order, these rows by these columns (int64 [n], [m])."""
    numbers = bits(part).view(len(rows), len(columns))
    each = max(1, _CHUNK.get(part.device.type, _MOST) // len(columns))
    cuts = zip(numbers.split(each), rows.split(each), strict=True)
    return torch.stack([((some * columns).sum(1) * numbers_of).sum() for some, numbers_of in cuts]).sum()


def row_hashes(tokens: Sequence[Tensor], inside: Tensor, rows: Sequence[Tensor] = ()) -> int:
    """In [0, 2^64): of rows, whatever their order. Each has what is `inside` (bool [B, T]) of `tokens` [B, T], and its
    numbers of `rows` ([B] or [B, K])."""
    total = torch.zeros(len(inside), dtype=torch.int64)
    for what, column in enumerate([*tokens, *rows]):
        numbers = bits(column.cpu().contiguous()).to(torch.int64)
        numbers = numbers * inside if what < len(tokens) else numbers.view(len(inside), column[:1].numel())
        total += (numbers * odd_numbers(what, np.arange(numbers.shape[1]))).sum(1)
    return int(mix64_(total + 1).sum()) & ((1 << 64) - 1)
