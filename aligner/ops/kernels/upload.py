"""Host tensors to a device, many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

ALIGNMENT = 256  # of a tensor's first byte, as CUDA's allocator gives it


def upload[T](item: T, device: torch.device) -> T:
    """The same dataclass or list (of such) with its tensors on `device`, those that are the same tensor still the same.

    CUDA takes each tensor from memory that is not pinned by a copy of its own, and lets the host wait for what the
    device does before it. A micro-batch has some thirty: they go in one copy from a pinned buffer, and nobody waits."""
    found: dict[int, Tensor] = {}
    _mapped(item, lambda tensor: found.setdefault(id(tensor), tensor))
    tensors = list(found.values())
    if device.type == "cuda":
        buffer, places = packed(tensors, pin=True)
        moved = unpacked(buffer.to(device, non_blocking=True), tensors, places)
    else:
        moved = [tensor.to(device) for tensor in tensors]
    there = dict(zip(found, moved, strict=True))
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
    """Their bytes in one buffer (uint8, on the CPU), and where each begins."""
    places, size = [], 0
    for tensor in tensors:
        places.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    for view, tensor in zip(unpacked(buffer, tensors, places), tensors, strict=True):
        view.copy_(tensor)
    return buffer, places


def unpacked(buffer: Tensor, like: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Tensors with the shapes and dtypes of `like` in a buffer that `packed` made, wherever it is now."""
    return [
        buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, place in zip(like, places, strict=True)
    ]
