"""Attention whose scores are changed between product and softmax, which torch's fused kernels cannot do: soft-capping
(Gemma 2, arXiv:2408.00118, section 2).

Scores exist for a block of queries at a time, and are made again in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aligner.config.scales import ScalesConfig

BLOCK = 1 << 24  # scores at a time


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): about x where that is small, and within cap."""
    return cap * torch.tanh(x / cap)


def scaled_logits(logits: Tensor, scales: ScalesConfig) -> Tensor:
    """Logits of any shape, as the family's authors scale and cap them."""
    if scales.logits != 1:
        logits = logits / scales.logits
    return capped(logits, scales.logits_softcap) if scales.logits_softcap else logits


def scored_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    """query [B, heads, n, d], key and value [B, kv_heads, m, d] -> [B, heads, n, d] in their dtype, softmax in float32.
    `mask` that can be expanded to [B, 1, n, m]: bool (what a query sees), or added to the scores; None: causal, the
    last query sees all keys. `scale`: None for 1 / sqrt(d)."""
    batch, heads, n, d = query.shape
    scale, step = scale or d**-0.5, max(1, BLOCK // (batch * heads * key.shape[2]))

    def block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        grouped = query.unflatten(1, (key.shape[1], -1))
        scores = capped(torch.matmul(grouped, key[:, :, None].transpose(-1, -2)).float() * scale, softcap)
        mask = mask[:, :, None]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return torch.matmul(scores.softmax(-1).to(value.dtype), value[:, :, None]).flatten(1, 2)

    parts = []
    for first in range(0, n, step):
        stop = min(n, first + step)
        seen = _causal(first, stop, n, key) if mask is None else mask.expand(-1, -1, n, -1)[:, :, first:stop]
        arguments = query[:, :, first:stop], key, value, seen
        again = torch.is_grad_enabled() and n > step
        parts.append(checkpoint(block, *arguments, use_reentrant=False) if again else block(*arguments))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _causal(first: int, stop: int, n: int, key: Tensor) -> Tensor:
    m = key.shape[2]
    places = torch.arange(m, device=key.device)
    return (places <= torch.arange(first, stop, device=key.device)[:, None] + m - n)[None, None]
