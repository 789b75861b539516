"""Functions whose result for a row depends neither on the rows beside it nor on how many there are, so that an engine
and a trainer which both call them compute the same bits (`model.kernels=invariant`).

Libraries choose a kernel, and with it the order of a sum, by the shape of a product. Here every product has one shape:
rows come in tiles of `ROWS`, keys in blocks of `KEYS` from position 0 on, with zeros behind the last (He et al. 2025,
"Defeating Nondeterminism in LLM Inference"). A key that a query does not see adds exact zeros. Sums over one row
(norms, softmax, log-softmax) are torch's, which go over each row by itself.

Backward is ordinary: nobody compares gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, KEYS = 16, 64
ALONE = 1 << 15  # numbers from which torch shares an operation among threads, at places that depend on all rows


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return an element-wise `function` of x [..., n]. torch computes the last few numbers of what a thread gets by
    other instructions than the rest: each thread gets whole rows."""
    rows = x.flatten(0, -2)
    step = max(1, (ALONE - 1) // x.shape[-1])
    parts = [function(few) for few in rows.split(step)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*x.shape[:-1], -1)


class _TiledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cuda":  # products are batch-invariant there (`megatron/invariant.py`)
            return F.linear(x, weight)
        rows = x.flatten(0, -2)
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
        out = torch.cat([F.linear(tile, weight) for tile in padded.split(ROWS)])
        return out[: len(rows)].view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = grad @ weight if ctx.needs_input_grad[0] else None
        d_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., k] W^T + bias."""
    out = _TiledProduct.apply(x, weight)
    return out if bias is None else out + bias


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ordinary: Callable[..., Tensor], *inputs: Any) -> Tensor:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.ordinary = ordinary
        return _attended(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mask = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in inputs]
            out = ctx.ordinary(*inputs, mask, ctx.scale)
        return None, *torch.autograd.grad(out, inputs, grad), None, None


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, ordinary: Callable[..., Tensor]
) -> Tensor:
    """Compute attention in float32; shapes and `mask` as in `scored_attention`. Keys of a row are in the order of their
    positions, from 0 on. `ordinary` has the other arguments, and the gradient."""
    return _Attention.apply(ordinary, query, key, value, mask, scale)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    (batch, heads, n, d), (groups, m, width) = query.shape, (*key.shape[1:3], value.shape[3])
    share, scale, dtype = heads // groups, scale or d**-0.5, query.dtype
    tokens = -(-ROWS // share)  # of a tile: with all query heads that read a key
    tiles = -(-n // tokens)
    seen = _seen(mask, n, m, query.device)
    seen = F.pad(seen, (0, -m % KEYS, 0, tiles * tokens - n)).split(tokens, 2)
    key, value = (
        F.pad(x.float(), (0, 0, 0, -m % KEYS)).reshape(batch * groups, -1, x.shape[3]).split(KEYS, 1)
        for x in (key, value)
    )
    query = F.pad(query.float(), (0, 0, 0, tiles * tokens - n)).view(batch, groups, share, tiles, tokens, d)
    query = query.permute(3, 0, 1, 2, 4, 5).reshape(tiles, batch * groups, share * tokens, d)
    outs = []
    for tile, (rows, seen_here) in enumerate(zip(query, seen, strict=True)):
        # without a mask the tile's last query sees so many keys
        blocks = len(key) if mask is not None else -(-min(m, m - n + (tile + 1) * tokens) // KEYS)
        scores = torch.cat([torch.bmm(rows, block.transpose(1, 2)) for block in key[:blocks]], 2).mul_(scale)
        scores = scores.view(batch, groups, share, tokens, -1)
        hidden = ~seen_here[:, :, None, :, : blocks * KEYS]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).view(*rows.shape[:2], -1)
        out = torch.bmm(weights[..., :KEYS], value[0])
        for number in range(1, blocks):
            out += torch.bmm(weights[..., number * KEYS : (number + 1) * KEYS], value[number])
        outs.append(out.view(batch, heads, tokens, width))
    return torch.cat(outs, 2)[:, :, :n].to(dtype)


def _seen(mask: Tensor | None, n: int, m: int, device: torch.device) -> Tensor:
    """Return bool [1 or batch, 1, n, m]: the keys that a query sees."""
    if mask is None:
        last = torch.arange(m - n, m, device=device)
        return (torch.arange(m, device=device) <= last[:, None])[None, None]
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen.expand(*seen.shape[:-2], n, m).reshape(-1, 1, n, m)
