"""User buffers in the stand-in for TransformerEngine's extension. They have one size, which gathers check as the real
ones do. Sums must have it too: the real ones would read past a smaller input. Messages go by torch.distributed."""

from __future__ import annotations

import enum
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

USED: Counter[str] = Counter()  # products with messages, by their kind


class CommOverlapType(enum.IntEnum):
    RS, AG = 0, 1


class CommOverlapHelper:
    def __init__(self, world: dist.ProcessGroup, tensor: dist.ProcessGroup):
        self.world, self.group = world, tensor


class CommOverlap:
    """A buffer [tokens, width] of this rank."""

    def __init__(
        self, shape: list[int], dtype: torch.dtype, helper: CommOverlapHelper, ranks: int, *kind: Any, **how: Any
    ):
        assert helper.group.size() == ranks and not shape[0] % ranks and not how["use_cublasmp"]
        self.group, self.rank = helper.group, helper.group.rank()
        self.data = torch.full(shape, 77).to(dtype)  # what a smaller input would leave in it

    def with_cublasmp(self) -> bool:
        return False

    def is_fp8_ubuf(self) -> bool:
        return self.data.dtype is torch.uint8

    def _own(self) -> Tensor:
        return self.data.chunk(self.group.size())[self.rank]

    def copy_into_buffer(self, x: Tensor, local_chunk: bool) -> None:
        assert local_chunk and x.dtype is self.data.dtype
        if x.numel() != self._own().numel():
            raise RuntimeError(f"Tried to copy an invalid tensor into a local chunk of a Userbuffers buffer: {x.shape}")
        self._own().copy_(x.reshape(self._own().shape))

    def get_buffer(self, local_chunk: bool = False, shape: list[int] | None = None) -> Tensor:
        data = self._own() if local_chunk else self.data
        return data if shape is None else data.view(shape)

    def gather(self, held: Tensor) -> None:
        """Gather the chunks of all ranks in the buffer, which the product reads."""
        assert held.untyped_storage().data_ptr() == self.data.untyped_storage().data_ptr(), "an input beside the buffer"
        parts = [torch.empty_like(self._own()) for _ in range(self.group.size())]
        dist.all_gather(parts, self._own().clone(), group=self.group)
        self.data.copy_(torch.cat(parts))
        USED["gathered"] += 1

    def scatter(self, sums: Tensor, out: Tensor) -> None:
        """Add the ranks' products, and write this rank's share of the sum to `out`."""
        assert sums.flatten(0, -2).shape == self.data.shape, f"{tuple(sums.shape)} is read as {tuple(self.data.shape)}"
        total = sums.flatten(0, -2).clone()
        dist.all_reduce(total, group=self.group)
        out.copy_(total.chunk(self.group.size())[self.rank].view(out.shape))
        USED["scattered"] += 1


class CommOverlapP2P(CommOverlap):
    pass


def device_supports_multicast() -> bool:
    return True


def get_stream_priority_range() -> tuple[int, int]:
    return 0, -5
