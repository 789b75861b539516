"""Attention to the tokens that an indexer chooses (DeepSeek Sparse Attention, arXiv:2512.02556, section 2.1).

For each query the indexer scores the keys that it may see, and attention sees the k that score highest. With a head's
index query q_h and weight w_h, and index key k_s, the score of key s is sum_h w_h max(0, q_h k_s), in float32. Of equal
scores those of earlier keys count as higher, so a choice does not depend on how rows are laid out.

The choice has no gradient. With a `Lesson` scores learn to be what attention weighs: of each query, the divergence of
softmax(scores) from the mean of all heads' attention weights, both over the chosen keys (equation 4 there), whose
gradient goes to the index alone. Scores exist for a block of queries at a time, and are made again in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.kernels.add_loss import add_loss
from aligner.ops.kernels.scored_attention import fused_attention, in_blocks

BLOCK = 1 << 26  # scores at a time: of each head of an indexer, or in a mask


class Lesson(NamedTuple):
    """How an indexer learns."""

    factors: Tensor  # float32 [queries], of their divergences in the loss
    total: Tensor  # float64 [], to which the divergences, times factors, are added
    groups: tuple[dist.ProcessGroup, ...]  # of ranks that share the heads of attention


class Index(NamedTuple):
    """What an indexer compares. Tensors have the axes of queries or keys in front: [..., heads, d], [..., heads] and
    [..., d]."""

    query: Tensor
    weight: Tensor  # float32, factors of the scores included
    key: Tensor
    top_k: int
    lesson: Lesson | None = None


@torch.no_grad()
def chosen(index: Index, seen: Tensor) -> Tensor:
    """Return bool [B, n, m]: which of the m keys each of n queries uses, of those that it may see by `seen`, bool that
    can be expanded to [B, n, m]. All tensors of `index` begin with B."""
    (batch, n, heads), m = index.query.shape[:3], index.key.shape[1]
    seen = seen.expand(batch, n, m)
    if m <= index.top_k:
        return seen
    key, parts, step = index.key.transpose(1, 2), [], max(1, BLOCK // (batch * heads * m))
    for first in range(0, n, step):
        query, weight, visible = (x[:, first : first + step] for x in (index.query, index.weight, seen))
        scores = _scores(query, weight, key).masked_fill_(~visible, -torch.inf)
        least = scores.topk(index.top_k).values[..., -1:]
        above, equal = scores > least, scores == least
        equal &= equal.cumsum(2) <= index.top_k - above.sum(2, keepdim=True)
        parts.append((above | equal) & visible)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _scores(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """Return scores float32 [B, n, m] of query [B, n, heads, d], weight [B, n, heads] and key [B, d, m]."""
    asked = query.flatten(1, 2)
    if query.is_cuda and query.dtype != torch.float32 and not torch.is_grad_enabled():
        products = torch.bmm(asked, key, out_dtype=torch.float32)  # which has no gradient
    else:
        products = torch.bmm(asked.float(), key.float())
    return torch.matmul(weight[:, :, None], products.relu_().unflatten(1, query.shape[1:3]))[:, :, 0]


def indexed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, index: Index
) -> Tensor:
    """Compute `fused_attention` where queries see what the index chooses. Shapes and `mask` are as there; each
    query must see a key. The index learns if it has a lesson."""
    batch, heads, m, lesson = *query.shape[:2], key.shape[2], index.lesson

    def block(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, asked: Tensor, weight: Tensor) -> Any:
        seen = seen[:, 0] if seen.dtype == torch.bool else seen[:, 0] == 0
        own = index._replace(query=asked.transpose(1, 2), weight=weight.transpose(1, 2))
        used = chosen(own, seen)
        out = fused_attention(query, key, value, used[:, None], scale)
        return out if lesson is None else (out, _divergence(query, key, scale, used, own, lesson)[:, None])

    step = max(1, BLOCK // (batch * m * (1 if lesson is None else max(heads, index.query.shape[2]))))
    own = index.query.transpose(1, 2), index.weight.transpose(1, 2)
    out = in_blocks(block, query, key, value, mask, step, *own, again=True)  # or backward would keep the masks
    if lesson is None:
        return out
    out, divergence = out
    loss = (divergence.flatten() * lesson.factors).sum()
    lesson.total.add_(loss.detach())
    return add_loss(out, loss)


def _divergence(query: Tensor, key: Tensor, scale: float | None, used: Tensor, index: Index, lesson: Lesson) -> Tensor:
    """Return float32 [B, n]: the divergence of each query, by keys `used` [B, n, m]."""
    with torch.no_grad():
        weights = torch.matmul(query.float(), key.float().transpose(2, 3)) * (scale or query.shape[3] ** -0.5)
        weights = weights.masked_fill_(~used[:, None], -torch.inf).softmax(3).sum(1)
        for group in lesson.groups:
            dist.all_reduce(weights, group=group)
        weights /= weights.sum(2, keepdim=True)
    logs = _scores(index.query, index.weight, index.key.transpose(1, 2)).masked_fill(~used, -torch.inf).log_softmax(2)
    return (torch.special.xlogy(weights, weights) - weights * logs.masked_fill(~used, 0)).sum(2)
