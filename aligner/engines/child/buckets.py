"""Tensors from the trainer to an engine's process: packed into one buffer that both see, a bucket at a time.

CUDA: a buffer of each of the engine's ranks on its own device, opened by the child once, through an IPC handle. CPU:
an anonymous file in memory, opened through the process that made it. The child answers each bucket before the buffer
is used again: otherwise the next bucket would overwrite tensors that are still being read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from aligner.errors import EngineError
from aligner.ops.kernels.checksum import tensor_checksum

ALIGN_BYTES = 256
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first of them that is set
EXPANDABLE = "expandable_segments"


def aligned(end: int) -> int:
    """Return the first aligned offset from `end` on."""
    return -(-end // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Slot:
    """The position of a tensor in the buffer."""

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
    """`size` bytes that every process of the node can open; pages are allocated when they are written."""

    size: int
    fd: int  # of process `pid`
    pid: int

    @classmethod
    def create(cls, size: int) -> MemoryFile:
        fd = os.memfd_create("aligner-weights")
        os.ftruncate(fd, size)
        return cls(size, fd, os.getpid())

    def tensor(self, device: int = 0) -> Tensor:
        """Return the memory as uint8 [size]. Raises EngineError where the process that made it is not visible."""
        try:
            with open(f"/proc/{self.pid}/fd/{self.fd}", "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), self.size), dtype=torch.uint8)
        except OSError as error:
            message = f"{error.filename}: {error.strerror}: expected processes of an engine to see each other in /proc"
            raise EngineError(f"{message}, as those of one container do") from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class CudaMemory:
    """The CUDA buffer of a trainer's rank, as `torch.multiprocessing` pickles it."""

    handle: Any

    @classmethod
    def of(cls, buffer: Tensor) -> CudaMemory:
        return cls(reduce_tensor(buffer))

    def tensor(self, device: int = 0) -> Tensor:
        """Open the buffer in another process, where the rank's device has the number `device`."""
        rebuild, arguments = self.handle
        arguments = list(arguments)
        arguments[6] = device  # of rebuild_cuda_tensor: storage_device
        return rebuild(*arguments)


Memory = MemoryFile | CudaMemory


def cuda_buffer(size: int, device: torch.device) -> Tensor:
    """Return uint8 [size] that another process can open."""
    with fixed_segments():
        return torch.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Allocate memory outside expandable segments. Another process would open such a segment by a file descriptor of
    this one, which most containers and systems refuse to a child."""
    settings = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
    fields = [field.strip() for field in settings.split(",")]
    fixed = [f"{EXPANDABLE}:False" if field.partition(":")[0].strip() == EXPANDABLE else field for field in fields]
    if fixed == fields:
        yield
        return
    change = torch._C._accelerator_setAllocatorSettings
    torch.cuda.empty_cache()  # free memory of such a segment would be taken first
    change(",".join(fixed))  # all settings: it resets those that are not named
    try:
        yield
    finally:
        change(settings)


def checksums(slots: Iterable[Slot], buffer: Tensor) -> dict[str, int]:
    """Return the checksums of the tensors as they arrived."""
    return {slot.name: tensor_checksum(slot.view(buffer)) for slot in slots}


class BucketWriter:
    """The trainer's side of the transfer. `buffer` uint8 [bytes] on the device of the transport; `dtypes` of the
    engine's tensors."""

    def __init__(self, buffer: Tensor, dtypes: Mapping[str, torch.dtype]):
        self.buffer, self.dtypes = buffer, dtypes

    def buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[Slot]]:
        """Copy tensors in, cast to the engine's dtypes; yield each full bucket, to be read before the next is asked
        for. The buffer must hold the largest tensor."""
        slots: list[Slot] = []
        end = 0
        for name, tensor in tensors:
            slot = Slot(name, tuple(tensor.shape), self.dtypes[name], end)
            if slots and slot.start + slot.nbytes > self.buffer.numel():
                yield self._ready(slots)
                slots, slot = [], replace(slot, start=0)
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
