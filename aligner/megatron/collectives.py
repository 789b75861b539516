"""Collectives of context and expert parallelism that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group
        out = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=group)
        return out, None


def gather_first(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [n, ...] of every rank to [ranks * n, ...], rank-major. Gradients are summed over ranks and split."""
    return _Gather.apply(x, group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_parts(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over ranks that all compute the SAME loss from the sum. The gradient of a rank's part is that of the sum,
    not `ranks` times it."""
    return x if group is None else _Sum.apply(x, group)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange x [ranks, ...]: x[r] goes to rank r, and out[r] came from rank r."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _Swap(torch.autograd.Function):
    """All tokens of a share of the heads (`to_heads`), or all heads of a share of the tokens; gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(x, group) if to_heads else _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_to_tokens if ctx.to_heads else _to_heads)(grad, ctx.group), None, None


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    n, heads, d = x.shape
    parts = x.view(n, group.size(), heads // group.size(), d).transpose(0, 1).contiguous()
    return _exchange(parts, group).flatten(0, 1)


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total, share, d = x.shape
    parts = _exchange(x.contiguous().view(group.size(), total // group.size(), share, d), group)
    return parts.transpose(0, 1).reshape(total // group.size(), group.size() * share, d)


def tokens_to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Convert each [n, heads, d] (own tokens, all heads) to [ranks * n, heads / ranks, d] (all tokens, own heads)."""
    return [_Swap.apply(x, group, True) for x in tensors]


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Convert back: [ranks * n, heads / ranks, d] -> [n, heads, d]."""
    return _Swap.apply(x, group, False)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, got), group
        out = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, got = ctx.sizes
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, got, group=ctx.group)
        return out, None, None, None


def all_to_all(x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send x [sum(sent), ...]: the first sent[0] rows go to rank 0, the next to rank 1. The result [sum(got), ...]
    begins with the got[0] rows of rank 0."""
    return _AllToAll.apply(x, sent, got, group)
