"""Element-wise parts of a layer with few passes over memory.

On a CPU these, not the matrix products, take most of a small model's step when left to autograd: every operation
makes a tensor, and the backward of a split is a copy. Each function here is one node of the graph that writes
straight to its result. They equal the plain formulas in their docstrings, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.ops.kernels import fused, invariant


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit, grad = _wide(x) * scale, _wide(grad)
        d_weight = (grad * unit).flatten(0, -2).sum(0)
        g = grad * weight
        along = torch.linalg.vecdot(g, unit).unsqueeze(-1).div_(-x.shape[-1])
        return g.addcmul_(unit, along).mul_(scale).to(x.dtype), d_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019)."""
    if x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16):
        return _RMSNorm.apply(x, weight, eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by_rows: bool) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        silu = torch.nn.functional.silu
        return (invariant.by_rows(silu, gate) if by_rows else silu(gate)).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        d_x = torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, -1)
        torch.mul(torch.nn.functional.silu(gate), grad, out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return d_x, None


def swiglu(x: Tensor, by_rows: bool = False) -> Tensor:
    """Return silu(gate) * up, x = [gate, up] along the last dimension (Shazeer 2020, arXiv:2002.05202). `by_rows`: as
    `invariant.by_rows`."""
    return fused.gated(x, "silu") if fused.takes(x) else _SwiGLU.apply(x, by_rows)


def gated(x: Tensor, activation: Callable[[Tensor], Tensor], limit: float | None = None) -> Tensor:
    """Return activation(gate) * up, x = [gate, up] along the last dimension, with the gate at most the limit and up
    within it on both sides."""
    if activation is gelu_tanh and fused.takes(x):
        return fused.gated(x, "gelu_tanh")
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * up


def geglu(x: Tensor) -> Tensor:
    return gated(x, gelu_tanh)


def relu2(x: Tensor) -> Tensor:
    """Return the square of ReLU (arXiv:2109.08668)."""
    return torch.nn.functional.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int, neighbours: bool) -> None:
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
        x, out = x[..., :rotated], out[..., :rotated]
    (a, b), (out_a, out_b) = ((t[..., ::2], t[..., 1::2]) if neighbours else t.chunk(2, -1) for t in (x, out))
    torch.mul(a, cos, out=out_a)
    out_a.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b)
    out_b.addcmul_(a, sin, value=sign)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        if fused.takes(x):
            return torch.ops.aligner.rotate(x, cos, sin, neighbours, False)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _turn(x, cos, sin, out, 1, neighbours)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if fused.takes(grad):
            return torch.ops.aligner.rotate(grad, *ctx.saved_tensors, ctx.neighbours, True), None, None, None
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        _turn(grad, *ctx.saved_tensors, out, -1, ctx.neighbours)
        return out, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Apply rotary embedding (arXiv:2104.09864) to x [N, heads, d]. It rotates the first r numbers as pairs (i, i +
    r/2), or with `neighbours` (2i, 2i + 1). cos, sin [N, 1, r/2]."""
    return _Rotate.apply(x, cos, sin, neighbours)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        if fused.takes(mixed):
            return torch.ops.aligner.split(mixed, cos, sin, neighbours)
        n, groups, share, d = mixed.shape
        share -= 2
        query, key = mixed.new_empty(n, groups, share, d), mixed.new_empty(n, groups, d)
        _turn(mixed[:, :, :share], cos[:, :, None], sin[:, :, None], query, 1, neighbours)
        _turn(mixed[:, :, share], cos, sin, key, 1, neighbours)
        return query.view(n, groups * share, d), key, mixed[:, :, share + 1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor, d_value: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        if fused.takes(d_key):
            return torch.ops.aligner.join(d_query, d_key, d_value, cos, sin, ctx.neighbours), None, None, None
        n, groups, d = d_key.shape
        share = d_query.shape[1] // groups
        out = d_key.new_empty(n, groups, share + 2, d)
        d_query = d_query.reshape(n, groups, share, d)
        _turn(d_query, cos[:, :, None], sin[:, :, None], out[:, :, :share], -1, ctx.neighbours)
        _turn(d_key, cos, sin, out[:, :, share], -1, ctx.neighbours)
        out[:, :, share + 1] = d_value
        return out, None, None, None


def split_and_rotate(
    mixed: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split mixed [N, kv_heads, q_per_kv + 2, d] (Megatron's order: the group's queries, its key, its value). Returns
    query [N, heads, d], key and value [N, kv_heads, d]; query and key are rotated as by `rotate`."""
    return _SplitAndRotate.apply(mixed, cos, sin, neighbours)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return out.index_copy_(0, ctx.saved_tensors[0], grad), None


def collect(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] of x [G, ...]. All of `index` must differ, so backward is a copy, not a sum."""
    return _Collect.apply(x, index)
