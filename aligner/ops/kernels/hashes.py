"""Hashes of tensors' bits that add up over the parts of a tensor, in any order, on any device.

An element counts with its bits times an odd 64-bit number for its row and one for its column, modulo 2^64. A change
of one element always shows; changes of several hide each other with a chance of at most 2^-33 (two that lose their
sign). On one core of a CPU this takes 1 ns per number, and `checksum.py`, which mixes each of them, 60: cheap enough
for the weights of every step.
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


def odd_numbers(purpose: int, indices: np.ndarray) -> Tensor:
    """Return int64: an odd number for each index, drawn for `purpose`."""
    return torch.from_numpy((scatter(purpose, indices) | np.uint64(1)).view(np.int64))


def bits(t: Tensor) -> Tensor:
    """Return its elements as integers of their size, bool as bytes."""
    t = t.detach()
    return t.view(torch.uint8) if t.dtype == torch.bool else t.view(_INTS[t.element_size()])


def part_hash(shard: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the hash, int64 [], of a contiguous `shard` that is, in row-major order, these rows by these columns
    (int64 [n], [m])."""
    numbers = bits(shard).view(len(rows), len(columns))
    each = max(1, _CHUNK.get(shard.device.type, _MOST) // len(columns))
    cuts = zip(numbers.split(each), rows.split(each), strict=True)
    return torch.stack([((some * columns).sum(1) * numbers_of).sum() for some, numbers_of in cuts]).sum()


def row_hashes(tokens: Sequence[Tensor], inside: Tensor, rows: Sequence[Tensor] = ()) -> int:
    """Hash rows, whatever their order, in [0, 2^64). Each row has the entries of `tokens` [B, T] that are `inside`
    (bool [B, T]), and its numbers of `rows` ([B] or [B, K])."""
    total = torch.zeros(len(inside), dtype=torch.int64)
    for what, column in enumerate([*tokens, *rows]):
        numbers = bits(column.cpu().contiguous()).to(torch.int64)
        numbers = numbers * inside if what < len(tokens) else numbers.view(len(inside), column[:1].numel())
        total += (numbers * odd_numbers(what, np.arange(numbers.shape[1]))).sum(1)
    return int(mix64_(total + 1).sum()) & ((1 << 64) - 1)
