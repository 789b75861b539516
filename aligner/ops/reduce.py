"""Reductions over a process group, where None means: only this process."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum `x` over `group`, in place if there is one. No gradient flows through it."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def max_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Take the maximum of `x` over `group`, in place if there is one. No gradient flows through it."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def sum_halves(halves: Tensor, group: dist.ProcessGroup | None = None) -> list[int]:
    """Sum 64-bit numbers over ranks (of the world if no `group` is given), modulo 2^64. `halves` int64 [n, 2] holds
    the low and the high 32 bits, so that nothing overflows."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(halves, group=group)
    return [(low + (high << 32)) & ((1 << 64) - 1) for low, high in halves.tolist()]


def of_each_rank(x: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the `x` of each rank of `group`; all have one of this shape. No gradient flows through it."""
    if group is None or group.size() == 1:
        return [x]
    tensors = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(tensors, x.contiguous(), group=group)
    return tensors


def gathered[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of each rank (of the world if no `group` is given), on every rank."""
    size = group.size() if group is not None else dist.get_world_size() if dist.is_initialized() else 1
    values = [value] * size
    if size > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def gathered_messages[T](value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the `value` of each rank of `group`, on every rank, as `gathered` does. Tensors in it are not pickled."""
    if group is None or group.size() == 1:
        return [value]
    message = packed(value)
    sizes = [int(size) for size in of_each_rank(torch.tensor(len(message)), group)]
    padded = torch.nn.functional.pad(message, (0, max(sizes) - len(message)))
    return [unpacked(each[:size]) for each, size in zip(of_each_rank(padded, group), sizes, strict=True)]


def dealt[T](parts: Sequence[T], group: dist.ProcessGroup) -> list[T]:
    """Send `parts[r]` of each rank to rank r. Returns the received ones, by sending rank. Tensors in them are not
    pickled."""
    sent = [packed(message) for message in parts]
    sizes = torch.tensor([len(data) for data in sent])
    received = [int(each[group.rank()]) for each in of_each_rank(sizes, group)]
    out = torch.empty(sum(received), dtype=torch.uint8)
    dist.all_to_all_single(out, torch.cat(sent), received, sizes.tolist(), group=group)
    return [unpacked(message) for message in out.split(received)]


class _MessageWriter(pickle.Pickler):
    """A pickler that leaves out CPU tensors, of which it collects the bytes."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, one: Any) -> tuple | None:
        if not isinstance(one, Tensor):
            return None
        self.tensors.append(one.detach().contiguous().flatten().view(torch.uint8))
        return len(self.tensors) - 1, one.dtype, one.shape


class _MessageReader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]):
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, left_out: tuple) -> Tensor:
        number, dtype, shape = left_out
        return self.tensors[number].clone().view(dtype).view(shape)  # a copy, as the message need not live so long


def packed(value: Any) -> Tensor:
    """Return a message as uint8 [n]: the sizes of its parts, a pickle, and the bytes of its CPU tensors. The ranks of a
    job sign the pickle as torch's objects (`cluster.handshake.seal_objects`)."""
    file, signed = io.BytesIO(), io.BytesIO()
    pickler = _MessageWriter(file)
    pickler.dump(value)
    distributed_c10d._pickler(signed).dump(file.getvalue())
    parts = [torch.frombuffer(signed.getbuffer(), dtype=torch.uint8), *pickler.tensors]
    sizes = torch.tensor([len(parts), *map(len, parts)])
    return torch.cat([sizes.view(torch.uint8), *parts])


def unpacked(message: Tensor) -> Any:
    """Return the value of a message of `packed`. Raises PeerError, before it is unpickled, for one from outside the
    job."""
    count = 8 * (1 + int(message[:8].clone().view(torch.int64)))
    sizes = message[8:count].clone().view(torch.int64).tolist()
    signed, *tensors = message[count:].split(sizes)
    pickled = distributed_c10d._unpickler(io.BytesIO(signed.numpy().tobytes())).load()
    return _MessageReader(io.BytesIO(pickled), tensors).load()


def first_cause(cause: str, group: dist.ProcessGroup | None = None) -> tuple[int, str] | None:
    """Return (rank, text) of the lowest rank (of the world if no `group` is given) whose `cause` is not empty, on
    every rank; None if all are."""
    return next(((rank, text) for rank, text in enumerate(gathered(cause, group)) if text), None)


def reduce_metrics(
    means: Mapping[str, tuple], maxima: Mapping[str, float], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Sum numerators and denominators, take maxima, over `group`; 0/0 is NaN. Every rank passes the same names."""
    names, tops = list(means), list(maxima)
    sums = torch.tensor([[float(n), float(d)] for n, d in means.values()], dtype=torch.float64).reshape(-1, 2)
    highs = torch.tensor([float(maxima[name]) for name in tops], dtype=torch.float64)
    if group is not None and group.size() > 1:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        sums, highs = sums.to(device), highs.to(device)
        dist.all_reduce(sums, group=group)
        if tops:
            dist.all_reduce(highs, op=dist.ReduceOp.MAX, group=group)
    values = {name: n / d if d else math.nan for name, (n, d) in zip(names, sums.tolist(), strict=True)}
    return values | dict(zip(tops, highs.tolist(), strict=True))
