"""Reductions over a process group, where None means: only this process."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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


def dealt[T](parts: Sequence[T], group: dist.ProcessGroup) -> list[T]:
    """Send `parts[r]` of each rank to rank r. Returns the received ones, by sending rank."""
    sent = [pickle.dumps(message) for message in parts]
    sizes = torch.tensor([len(data) for data in sent])
    received = [int(each[group.rank()]) for each in of_each_rank(sizes, group)]
    whole, out = bytearray(b"".join(sent)), torch.empty(sum(received), dtype=torch.uint8)
    dist.all_to_all_single(out, torch.frombuffer(whole, dtype=torch.uint8), received, sizes.tolist(), group=group)
    return [pickle.loads(message.numpy().tobytes()) for message in out.split(received)]


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
