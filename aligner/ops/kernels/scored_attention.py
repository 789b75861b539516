"""Attention by torch's fused kernels; and by blocks where scores change between product and softmax, which those
cannot do: soft-capping (Gemma 2, arXiv:2408.00118, section 2).

Scores exist for a block of queries at a time, and are made again in backward.

Sinks (gpt-oss, arXiv:2508.10925; Xiao et al. 2023, arXiv:2309.17453) need no kernel of their own: a score of each
head that joins the softmax is that of one more key, whose value is 0 (`sink_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from aligner.config.sections.model.attention import ScalesConfig
from aligner.ops.kernels import invariant

BLOCK = 1 << 24  # scores at a time


class ScoreRule(NamedTuple):
    """Changes of the products of queries and keys before the softmax."""

    scale: float | None = None  # their factor; None: 1 / sqrt(d)
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # [heads], scores that join them
    invariant: bool = False  # `model.kernels=invariant`


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: ScoreRule) -> Tensor:
    """Call the function below that supports `scores`: shapes and `mask` as in `scored_attention`."""
    if scores.invariant:
        return invariant.attention(query, key, value, mask, scores.scale, fused_attention)
    if scores.softcap:
        return scored_attention(query, key, value, mask, scores.scale, scores.softcap)
    if scores.sinks is not None:
        return sink_attention(query, key, value, mask, scores.scale, scores.sinks)
    return fused_attention(query, key, value, mask, scores.scale)


def capped(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap): about x where that is small, and within cap."""
    return cap * torch.tanh(x / cap)


def scaled_logits(logits: Tensor, scales: ScalesConfig) -> Tensor:
    """Scale and cap logits of any shape as the family's authors do."""
    if scales.logits != 1:
        logits = logits / scales.logits
    return capped(logits, scales.logits_softcap) if scales.logits_softcap else logits


def scored_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    """Compute query [B, heads, n, d], key and value [B, kv_heads, m, d] -> [B, heads, n, d] in their dtype, softmax
    in float32. `mask` that can be expanded to [B, 1, n, m]: bool (what a query sees), or added to the scores; None:
    causal, the last query sees all keys. `scale`: None for 1 / sqrt(d)."""
    batch, heads, _, d = query.shape
    scale, step = scale or d**-0.5, max(1, BLOCK // (batch * heads * key.shape[2]))

    def block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        grouped = query.unflatten(1, (key.shape[1], -1))
        scores = capped(torch.matmul(grouped, key[:, :, None].transpose(-1, -2)).float() * scale, softcap)
        mask = mask[:, :, None]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return torch.matmul(scores.softmax(-1).to(value.dtype), value[:, :, None]).flatten(1, 2)

    return in_blocks(block, query, key, value, mask, step)


def in_blocks(
    block: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    step: int,
    *own: Tensor,
    again: bool = False,
) -> Any:
    """Call `block(query, key, value, mask, *own)` for `step` queries at a time, and again in backward where there are
    several, or with `again`. It returns [B, any, n, ...], or several of them. `own`: such tensors of the queries. Other
    shapes and `mask` are as in `scored_attention`; `block` always gets a mask."""
    n, parts = query.shape[2], []
    for first in range(0, n, step):
        stop = min(n, first + step)
        if mask is None:
            m = key.shape[2]
            last = torch.arange(first, stop, device=key.device)[:, None] + m - n
            seen = (torch.arange(m, device=key.device) <= last)[None, None]
        else:
            seen = mask.expand(-1, -1, n, -1)[:, :, first:stop]
        arguments = query[:, :, first:stop], key, value, seen, *(x[:, :, first:stop] for x in own)
        twice = torch.is_grad_enabled() and (again or n > step)
        parts.append(checkpoint(block, *arguments, use_reentrant=False) if twice else block(*arguments))
    if len(parts) == 1:
        return parts[0]
    return (
        torch.cat(parts, 2)
        if isinstance(parts[0], Tensor)
        else tuple(torch.cat(x, 2) for x in zip(*parts, strict=True))
    )


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None) -> Tensor:
    """Call torch's kernel, with a shape and `mask` as in `scored_attention`. Values may have another width, which the
    result then has."""
    n, m, grouped = query.shape[2], key.shape[2], query.shape[1] != key.shape[1]
    if mask is None and n != m:
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler: a second of every start

        mask = causal_lower_right(n, m)
    causal, width = mask is None, value.shape[3]
    if width < query.shape[3]:  # fused kernels want one width: zeros beside the values give zeros
        value = F.pad(value, (0, query.shape[3] - width))
    short = m <= SHORT and (mask is None or (isinstance(mask, Tensor) and mask.dtype == query.dtype))
    if short and query.device.type == "cpu" and query.dtype == torch.bfloat16 and torch.is_grad_enabled():
        return _Short.apply(query, key, value, mask, scale)[..., :width]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped, scale=scale
    )
    return out[..., :width]


SHORT = 256  # keys of a row


class _Short(torch.autograd.Function):
    """torch's fused kernel of a CPU, forward in bfloat16 and backward in float32. Of short rows its small products in
    bfloat16 take 2 to 7 times as long, and oneDNN compiles a kernel for each new length."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = [x.float() for x in (grad, query, key, value, out)]
        mask = None if mask is None else mask.float()
        grads = kernel(*wide, lse, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
        return *(x.to(query.dtype) for x in grads), None, None


SINK_WIDTH = 8  # numbers by which heads grow: fused kernels want multiples of 8


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor
) -> Tensor:
    """Compute `scored_attention` with `sinks` [heads] in place of a cap. The first of the keys is the sink's: its
    products with the queries of a head are the head's sink. Without a mask a query that nobody reads comes first as
    well, so that the others still see the keys up to their own."""
    d, value_width, causal = query.shape[3], value.shape[3], mask is None
    scale = scale or d**-0.5
    own = sinks.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    query = F.pad(torch.cat([query, own], 3), (0, SINK_WIDTH - 1, int(causal), 0))
    key, value = (F.pad(x, (0, SINK_WIDTH, 1, 0)) for x in (key, value))
    key[:, :, 0, d] = 1 / scale
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
    return fused_attention(query, key, value, mask, scale)[:, :, int(causal) :, :value_width]
