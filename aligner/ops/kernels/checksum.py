"""A hash of a tensor's bytes that is the same on every device and in every order of reduction."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements hashed at once: bounds the int64 temporaries to 2 x 32 MiB
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def signed64(value: int) -> int:
    """Return any integer, modulo 2^64, as the int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = signed64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = signed64(0xBF58476D1CE4E5B9), signed64(0x94D049BB133111EB)


def mix64_(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014) to int64 bits, in place: a bijection that spreads
    every input bit over all output bits."""
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x.bitwise_xor_((x >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)  # the mask makes the shift logical
    return x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))


def tensor_checksum(t: Tensor) -> int:
    """Return sum_i mix(bits_i + (i + 1) * golden) mod 2^64, i the index in row-major order.

    It is exact on the bytes: -0.0 and 0.0 differ, and so do two elements that changed places. Cast to the dtype to be
    compared before calling. Integer addition commutes, so CPU and CUDA agree.
    """
    return part_checksum(t, t.numel(), t.numel(), 0)


def part_checksum(shard: Tensor, inner: int, width: int, start: int) -> int:
    """Return a shard's share of `tensor_checksum`. The shares of shards that make up a tensor add up to its checksum,
    modulo 2^64.

    The shard, in row-major order, is `inner` neighbouring elements at a time: the first at index `start` of the
    tensor, and so on every `width` elements.
    """
    bits = shard.detach().contiguous().view(-1).view(_INTS[shard.element_size()])
    total = 0
    for begin in range(0, bits.numel(), _CHUNK):
        x = bits[begin : begin + _CHUNK].to(torch.int64, copy=True)
        index = torch.arange(begin, begin + x.numel(), device=shard.device)
        if inner < bits.numel():
            index.add_(index // inner, alpha=width - inner)
        index.add_(start + 1)
        total += int(mix64_(x.add_(index.mul_(GOLDEN))).sum())
    return total & ((1 << 64) - 1)
