"""Attention to the tokens that an indexer chooses (DeepSeek Sparse Attention, arXiv:2512.02556, section 2.1).

For each query the indexer scores the keys that it may see, and attention sees the k that score highest. With a head's
index query q_h and weight w_h, and index key k_s, the score of key s is sum_h w_h max(0, q_h k_s), in float32. Of equal
scores those of earlier keys count as higher, so a choice does not depend on how rows are laid out.

The choice has no gradient. Scores exist for a block of queries at a time, and are made again in backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligner.ops.kernels.scored_attention import fused_attention, in_blocks

BLOCK = 1 << 26  # scores at a time: of each head of an indexer, or in a mask


class Index(NamedTuple):
    """What an indexer compares. Tensors have the axes of queries or keys in front: [..., heads, d], [..., heads] and
    [..., d]."""

    query: Tensor
    weight: Tensor  # float32, factors of the scores included
    key: Tensor
    top_k: int


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
        products = _products(query.flatten(1, 2), key).relu_().unflatten(1, (-1, heads))
        scores = torch.matmul(weight[:, :, None], products)[:, :, 0].masked_fill_(~visible, -torch.inf)
        least = scores.topk(index.top_k).values[..., -1:]
        above, equal = scores > least, scores == least
        equal &= equal.cumsum(2) <= index.top_k - above.sum(2, keepdim=True)
        parts.append((above | equal) & visible)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return query [B, n, d] times key [B, d, m] in float32."""
    if query.is_cuda and query.dtype != torch.float32:
        return torch.bmm(query, key, out_dtype=torch.float32)
    return torch.bmm(query.float(), key.float())


def indexed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, index: Index
) -> Tensor:
    """Compute `fused_attention` where queries see what the index chooses. Shapes and `mask` are as there."""

    def block(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, asked: Tensor, weight: Tensor) -> Tensor:
        seen = seen[:, 0] if seen.dtype == torch.bool else seen[:, 0] == 0
        own = Index(asked.transpose(1, 2), weight.transpose(1, 2), index.key, index.top_k)
        return fused_attention(query, key, value, chosen(own, seen)[:, None], scale)

    step = max(1, BLOCK // (len(query) * key.shape[2]))
    own = index.query.transpose(1, 2), index.weight.transpose(1, 2)
    return in_blocks(block, query, key, value, mask, step, *own, again=True)  # or backward would keep the masks
