"""Constant matrices held in 4 or 8 bits, and products with them.

Each row is cut into blocks of 64 numbers (the last may be shorter) with one float32 scale, the largest magnitude in
it. So a row, and a shard of whole blocks of it, is held alike at any position. `int8` and `fp8` (E4M3) divide by the
scale and round. `nf4` (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, appendix E) takes the nearest of 16 quantiles
of a normal distribution, two to a byte, the earlier number in the upper half. The bits are those of bitsandbytes'
blocks of 64, whose kernel decodes `nf4` on CUDA where it is installed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KINDS = ("int8", "fp8", "nf4")
BLOCK = 64
SCALE_BYTES = 4
BITS = {"int8": 8, "fp8": 8, "nf4": 4}
_TOP = {"int8": 127.0, "fp8": 448.0}
_TINY = 1e-38  # the scale of a block of zeros
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
_BOUNDS = (NF4[:-1] + NF4[1:]) / 2


def held_bytes(rows: int, columns: int, kind: str) -> int:
    """Return the bytes that `Frozen` holds of such a matrix."""
    blocks = -(-columns // BLOCK)
    return rows * (blocks * SCALE_BYTES + (-(-columns // 2) if kind == "nf4" else columns))


@dataclass(frozen=True)
class Frozen:
    """A held matrix, whose dimensions except the last are R together: codes uint8 [R, C / 2] (nf4) or 8-bit numbers
    [R, C], scales float32 [R, blocks]."""

    kind: str
    shape: torch.Size
    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor, kind: str) -> Frozen:
        rows = weight.detach().reshape(-1, weight.shape[-1])
        columns = rows.shape[1]
        blocks = torch.nn.functional.pad(rows.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        inverse = 1.0 / scales.clamp_min(_TINY)
        scaled = (blocks * inverse[..., None]).clamp_(-1, 1).flatten(1)[:, :columns]
        return cls(kind, weight.shape, _codes(scaled, kind), scales)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the held matrix, rounded once to `dtype`."""
        columns = self.shape[-1]
        if self.kind == "nf4" and self.codes.is_cuda and columns % BLOCK == 0 and has_bitsandbytes():
            return _by_bitsandbytes(self, dtype)
        if self.kind == "nf4":
            pairs = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten(1)[:, :columns]
            numbers = NF4.to(self.codes.device)[pairs.int()]
        else:
            numbers = self.codes.float() * (1 / _TOP[self.kind])
        numbers = torch.nn.functional.pad(numbers, (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        return (numbers * self.scales[..., None]).flatten(1)[:, :columns].to(dtype).view(self.shape)


def dense(weight: Tensor) -> Tensor:
    """Return a parameter's numbers. A held one is empty, and its attribute `held` has them."""
    held = held_by(weight)
    return weight if held is None else held.dense(weight.dtype)


def held_by(weight: Tensor) -> Frozen | None:
    return getattr(weight, "held", None)


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def _codes(scaled: Tensor, kind: str) -> Tensor:
    """Return the codes of scaled [R, C] in [-1, 1]."""
    if kind == "int8":
        return (scaled * _TOP[kind]).round_().to(torch.int8)
    if kind == "fp8":
        return (scaled * _TOP[kind]).to(torch.float8_e4m3fn)
    codes = torch.bucketize(scaled.contiguous(), _BOUNDS.to(scaled.device)).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, scaled.shape[1] % 2))
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def _by_bitsandbytes(held: Frozen, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(held.scales.flatten(), held.shape, NF4.to(held.codes.device), BLOCK, "nf4", dtype)
    return dequantize_4bit(held.codes.view(-1, 1), state)


class _FrozenLinear(torch.autograd.Function):
    """Product that keeps the held matrix between forward and backward, not the dense one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Frozen) -> Tensor:
        ctx.held = held
        return torch.nn.functional.linear(x, held.dense(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.matmul(ctx.held.dense(grad.dtype)), None


def frozen_linear(x: Tensor, held: Frozen) -> Tensor:
    """Multiply x [..., I] with the held matrix [O, I], transposed -> [..., O]. It is made dense for the product and
    again in backward."""
    return _FrozenLinear.apply(x, held)
