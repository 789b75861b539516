"""Attention of the native engine: causal over whole prompts, and of the new tokens of rows against the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.native.scratch import Scratch
from aligner.ops.kernels.indexed_attention import Index, indexed_attention
from aligner.ops.kernels.scored_attention import ScoreRule, attention, capped

# positions up to which products and sums beat thousands of tiny matrix products on CPU (measured)
_SHORT, _SHORT_BF16 = 16, 32
_PRODUCT_ELEMENTS = 1 << 23  # of the intermediate product; more rows are done in parts


class PrefillPositions(NamedTuple):
    """The positions of the M = P x T tokens of a prefill whose rows' first positions are staged already."""

    rows: Tensor  # int64 [M]
    positions: Tensor  # int64 [M]
    seen: Tensor  # bool [P, 1, T, staged positions]: all up to their own


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: ScoreRule, index: Index | None = None
) -> Tensor:
    """Return causal attention. q [P, T, heads, d], k [P, T, kv_heads, d], v [P, T, kv_heads, e], right-padded -> [P, T,
    heads * e]. `mask` bool [T, T]: the keys that a query sees, instead of all up to its own; or [P, 1, T, T'] of other
    keys. `index` [P, T, ...]: what chooses among these.

    Right padding needs no mask: a padded key comes after every real query.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if mask is not None and mask.dim() == 2 and scores.softcap:
        mask = mask[None, None]
    if index is None:
        return attention(q, k, v, mask, scores).transpose(1, 2).flatten(2)
    return indexed_attention(q, k, v, mask, scores.scale, index).transpose(1, 2).flatten(2)


def rotate(x: Tensor, rope: Tensor, neighbours: bool) -> None:
    """Rotate in place: x float32 [M, heads, d] times rope complex64 [M, 1, d / 2], which pairs neighbours or halves."""
    if neighbours:
        torch.view_as_complex(x.unflatten(2, (-1, 2))).mul_(rope)
        return
    a, b = x.chunk(2, 2)
    turned = torch.complex(a, b).mul_(rope)
    a.copy_(turned.real)
    b.copy_(turned.imag)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scratch: Scratch, scores: ScoreRule) -> Tensor:
    """Return attention of w new tokens per row, one row's behind the other's: q [n * w, heads, d], k and v [n,
    kv_heads, T, d], mask float32 [n * w, 1, 1, T] (0 or -inf) -> [n * w, heads * d]."""
    (tokens, heads, d), (n, groups) = q.shape, k.shape[:2]
    w, share = tokens // n, heads // groups
    if scores.invariant:
        out = attention(q.view(n, w, heads, d).transpose(1, 2), k, v, mask.view(n, 1, w, -1), scores)
        return out.transpose(1, 2).reshape(tokens, heads * d)
    if w == 1:
        return _attention(q.unflatten(1, (groups, share)), k, v, mask, scratch, scores).view(n, heads * d)
    # a row's tokens and the query heads of a group alike read the group's keys
    q = q.view(n, w, groups, share, d).transpose(1, 2).reshape(n, groups, w * share, d)
    mask = mask.view(n, 1, w, 1, -1).expand(n, 1, w, share, -1).flatten(2, 3)
    if scores.sinks is not None:
        scores = scores._replace(sinks=scores.sinks.view(groups, 1, share).expand(groups, w, share).flatten())
    out = _attention(q, k, v, mask, scratch, scores).view(n, groups, w, share, d)
    return out.transpose(1, 2).reshape(tokens, heads * d)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scratch: Scratch, scores: ScoreRule) -> Tensor:
    """Return q [n, kv_heads, s, d], k and v [n, kv_heads, T, d], mask [n, 1, 1 or s, T] -> [n, kv_heads, s, d]."""
    (n, groups, share, d), (scale, softcap, sinks, _) = q.shape, scores
    length, scale = k.shape[2], scale or d**-0.5
    on_cpu, half = q.device.type == "cpu", q.dtype is torch.bfloat16
    if softcap:
        changed = capped(torch.matmul(q, k.transpose(2, 3)).float() * scale, softcap) + mask
        return torch.matmul(changed.softmax(-1).to(v.dtype), v)
    if sinks is not None:
        products = torch.add(mask, torch.matmul(q, k.transpose(2, 3)).float(), alpha=scale)
        own = sinks.float().view(groups, -1, 1).expand(n, groups, share, 1)
        weights = torch.cat([products, own], 3).softmax(-1)[..., :-1]
        return torch.matmul(weights.to(v.dtype), v)
    if on_cpu and length < (_SHORT_BF16 if half else _SHORT):
        return _by_products(q, k, v, mask, scale, scratch)
    if on_cpu and half:  # tiny products in bfloat16 are slow: the query heads of a group are its positions instead
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), scale=scale).contiguous()
    products = torch.add(mask, torch.matmul(q, k.transpose(2, 3)).float(), alpha=scale)
    return torch.matmul(products.softmax(-1).to(v.dtype), v)


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, scratch: Scratch) -> Tensor:
    n, groups, share, d = q.shape
    length = k.shape[2]
    out = scratch.take("attention", n, groups, share, d)
    chunk = max(1, _PRODUCT_ELEMENTS // (groups * share * length * d))
    for a in range(0, n, chunk):
        b = min(n, a + chunk)
        product = scratch.take("product", b - a, groups, share, length, d)
        torch.mul(q[a:b, :, :, None], k[a:b, :, None], out=product)
        scores = torch.add(mask[a:b], product.sum(-1, dtype=torch.float32), alpha=scale)
        weights = scores.softmax(-1).to(v.dtype)
        torch.mul(weights[..., None], v[a:b, :, None], out=product)
        torch.sum(product, dim=3, out=out[a:b])
    return out
