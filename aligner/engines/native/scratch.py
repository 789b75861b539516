"""Buffers that grow and are used again: on CPU, fresh pages cost more than the arithmetic on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aligner.cluster.memory_pages import ask_for_large_pages


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return torch.zeros, on a CPU in large pages: for memory that every step reads."""
    return cleared(torch.empty(shape, dtype=dtype, device=device))


def cleared(buffer: Tensor) -> Tensor:
    if buffer.device.type == "cpu":
        ask_for_large_pages(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
    return buffer.zero_()


class Scratch:
    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return [shape] with any finite content; valid until the next `take` of the same name.

        Never raw memory: attention gives weight 0 to entries beyond a row, and 0 x NaN would still be NaN.
        """
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            self._flat.pop(name, None)  # free before allocating
            flat = self._flat[name] = zeros(size, dtype=self.dtype, device=self.device)
        return flat[:size].view(shape)

    @property
    def held_bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def size(self, name: str) -> int:
        """Return the number of elements held under this name."""
        return self._flat[name].numel() if name in self._flat else 0

    def clear(self) -> None:
        self._flat.clear()
