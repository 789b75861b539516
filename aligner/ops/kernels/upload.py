"""Host tensors to a device, many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

ALIGNMENT = 256  # of a tensor's first byte, as CUDA's allocator gives it


def upload[T](item: T, device: torch.device) -> T:
    """Return the same dataclass or list (of such) with its tensors on `device`; equal tensors stay one tensor.

    CUDA copies each unpinned tensor separately, and the host waits for the device's earlier work. A micro-batch has
    some thirty: they go in one copy from a pinned buffer, and nobody waits.
    """
    unique: dict[int, Tensor] = {}
    _mapped(item, lambda tensor: unique.setdefault(id(tensor), tensor))
    tensors = list(unique.values())
    if device.type == "cuda":
        buffer, places = packed(tensors, pin=True)
        moved = unpacked(buffer.to(device, non_blocking=True), tensors, places)
    else:
        moved = [tensor.to(device) for tensor in tensors]
    there = dict(zip(unique, moved, strict=True))
    return _mapped(item, lambda tensor: there[id(tensor)])


def _mapped[T](item: T, change: Callable[[Tensor], Tensor]) -> T:
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, list):
        return [_mapped(x, change) for x in item]
    if is_dataclass(item):
        return replace(item, **{f.name: _mapped(getattr(item, f.name), change) for f in fields(item)})
    return item


def packed(tensors: Sequence[Tensor], pin: bool = False) -> tuple[Tensor, list[int]]:
    """Return their bytes in one buffer (uint8, on the CPU), and where each begins."""
    places, size = [], 0
    for tensor in tensors:
        places.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    for view, tensor in zip(unpacked(buffer, tensors, places), tensors, strict=True):
        view.copy_(tensor)
    return buffer, places


def unpacked(buffer: Tensor, like: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Return tensors with the shapes and dtypes of `like` in a buffer that `packed` made, on any device."""
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(like, places, strict=True)
    ]
