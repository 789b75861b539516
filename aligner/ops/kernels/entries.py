"""Entries that stand for several tokens in attention (DeepSeek-V4, section 2.3).

Entry e of a row stands for its tokens em to em + m - 1. It is the sum of their vectors times the softmax, over these
tokens and for each number of the vector by itself, of their gates plus a bias of the token's place in the entry. In
layers whose indexer chooses among entries each token has two vectors with gates: one for its own entry, and one for
the entry behind it, which so stands for 2m tokens. A query sees the entries whose tokens are all up to its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pooled(kv: Tensor, gate: Tensor, bias: Tensor, twice: bool) -> Tensor:
    """Return entries [B, T // m, d] of the vectors and gates of rows, [B, T, d] each, with bias [m, d]; what is left
    makes none. `twice`: [B, T, 2d] and [m, 2d], first for the entry behind the token's own."""
    rows, length, width = kv.shape
    m = len(bias)
    count = length // m
    kv, gate = (x[:, : count * m].reshape(rows, count, m, width) for x in (kv, gate))
    gate = gate.float() + bias
    if twice:
        kv, gate = (_beside(x, empty) for x, empty in ((kv, 0.0), (gate, -torch.inf)))
    return (kv * gate.softmax(2).to(kv.dtype)).sum(2)


def _beside(x: Tensor, empty: float) -> Tensor:
    """Return [B, n, 2m, d] of x [B, n, m, 2d]: of each entry the tokens before its own, then its own."""
    behind, own = x.chunk(2, 3)
    return torch.cat([F.pad(behind, (0, 0, 0, 0, 1, 0), value=empty)[:, :-1], own], 2)


def entries_seen(positions: Tensor, count: int, tokens: int) -> Tensor:
    """Return bool [..., count]: the entries that queries at int64 positions [...] see."""
    return torch.arange(count, device=positions.device) < (positions[..., None] + 1) // tokens


def tokens_seen(positions: Tensor, count: int, window: int) -> Tensor:
    """Return bool [..., count]: the tokens that they see."""
    key = torch.arange(count, device=positions.device)
    return (key <= positions[..., None]) & (key > positions[..., None] - window)
