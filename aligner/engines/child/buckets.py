"""Tensors from the trainer to an engine's process: packed into one buffer that both see, a bucket at a time.

CUDA: the trainer's buffer, opened by the child through an IPC handle, once. CPU: an anonymous file in memory, opened
by way of the process that made it. The child answers each bucket before the buffer is used again: without that the
next bucket would overwrite tensors that are still being read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from aligner.errors import EngineError

ALIGN_BYTES = 256


def aligned(end: int) -> int:
    """Where the next tensor may begin."""
    return -(-end // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # bytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass
class MemoryFile:
    """`size` bytes for every process of the node that is told of them; pages come into being when they are written."""

    size: int
    fd: int  # of process `pid`
    pid: int

    @classmethod
    def create(cls, size: int) -> MemoryFile:
        fd = os.memfd_create("aligner-weights")
        os.ftruncate(fd, size)
        return cls(size, fd, os.getpid())

    def tensor(self) -> Tensor:
        """uint8 [size]. Raises EngineError where the process that made it is not seen."""
        try:
            with open(f"/proc/{self.pid}/fd/{self.fd}", "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), self.size), dtype=torch.uint8)
        except OSError as error:
            told = f"{error.filename}: {error.strerror}: expected processes of an engine to see each other in /proc"
            raise EngineError(f"{told}, as those of one container do") from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class CudaMemory:
    """The trainer's CUDA buffer: what `torch.multiprocessing` pickles of it."""

    handle: Any

    @classmethod
    def of(cls, buffer: Tensor) -> CudaMemory:
        return cls(reduce_tensor(buffer))

    def tensor(self) -> Tensor:
        """In another process, whose first device is the trainer's, whatever its number there."""
        rebuild, arguments = self.handle
        arguments = list(arguments)
        arguments[6] = 0  # of rebuild_cuda_tensor: storage_device
        return rebuild(*arguments)


Memory = MemoryFile | CudaMemory


class BucketWriter:
    """The trainer's side. `buffer` uint8 [bytes] on the device of the transport."""

    def __init__(self, buffer: Tensor, dtype: torch.dtype):
        self.buffer, self.dtype = buffer, dtype

    def buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[Slot]]:
        """Copies tensors in, cast to the engine's dtype; each yielded bucket must be read before the next is asked
        for. The buffer must hold the largest tensor."""
        slots: list[Slot] = []
        end = 0
        for name, tensor in tensors:
            slot = Slot(name, tuple(tensor.shape), self.dtype, end)
            if slots and slot.start + slot.nbytes > self.buffer.numel():
                yield self._ready(slots)
                slots, slot = [], Slot(name, slot.shape, self.dtype, 0)
            assert slot.start + slot.nbytes <= self.buffer.numel(), (name, slot.nbytes, self.buffer.numel())
            slot.view(self.buffer).copy_(tensor)
            slots.append(slot)
            end = aligned(slot.start + slot.nbytes)
        if slots:
            yield self._ready(slots)

    def _ready(self, slots: list[Slot]) -> list[Slot]:
        if self.buffer.is_cuda:  # copies are queued; the other process has other streams
            torch.cuda.synchronize(self.buffer.device)
        return slots
