"""Attention of rows that lie end to end, forward and backward, as cuDNN's kernels define it; for `te_extension.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Ends = tuple[Tensor, Tensor]  # of queries and of keys, int32 [rows + 1]


class Rule(NamedTuple):
    """Which keys a query sees: `causal` from the top left or, with `bottom_right`, so that the last one sees all;
    `window` of them to its left (-1: all)."""

    scale: float
    causal: bool
    bottom_right: bool
    window: int

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[h, q, k] of one row."""
        unasked = len(k) - len(q)
        assert unasked == 0 or (unasked > 0 and self.bottom_right), f"{len(q)} queries of {len(k)} keys"
        own, key = torch.arange(len(q))[:, None] + unasked * self.bottom_right, torch.arange(len(k))
        seen = (key <= own) if self.causal else key >= 0
        if self.window >= 0:
            seen = seen & (key >= own - self.window)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return (torch.einsum("qhd,khd->hqk", q, k) * self.scale).masked_fill(~seen, -torch.inf)


def _rows(ends: Ends) -> Iterator[tuple[slice, slice]]:
    both = zip(*(zip(e[:-1].tolist(), e[1:].tolist(), strict=True) for e in ends), strict=True)
    for row in both:
        yield tuple(slice(*bounds) for bounds in row)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule, ends: Ends, longest: tuple[int, int], sinks: Tensor | None):
    """The outputs, and log(sum(exp(scores))) [tokens, h, 1]. `sinks` [1, h, 1, 1]: scores without values."""
    for e, n, x in zip(ends, longest, (q, k), strict=True):
        assert e.dtype == torch.int32 and e.is_contiguous() and int(e[0]) == 0
        assert int(e.diff().max()) <= n, f"a row of {int(e.diff().max())} tokens, and max_seqlen is {n}"
        assert int(e[-1]) == len(x), f"rows of {int(e[-1])} tokens, and {len(x)} are here"
    out, stats = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32), torch.zeros(*q.shape[:2], 1)
    for own, theirs in _rows(ends):
        scores = rule.scores(q[own].float(), k[theirs].float())
        sums = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            sums = torch.logaddexp(sums, sinks[0])
        values = v[theirs].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[own] = torch.einsum("hqk,khd->qhd", (scores - sums).exp(), values)
        stats[own] = sums.transpose(0, 1)
    return out.to(q.dtype), stats


def attend_backward(q, k, v, o, d_o, stats, rule: Rule, ends: Ends, sinks: Tensor | None) -> list[Tensor | None]:
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    d_o, o, groups = d_o.view(*q.shape[:-1], -1).float(), o.view(*q.shape[:-1], -1).float(), q.shape[1] // k.shape[1]
    along = (d_o * o).sum(-1)
    for own, theirs in _rows(ends):
        x, y = q[own].float(), k[theirs].float()
        shares = (rule.scores(x, y) - stats[own].transpose(0, 1)).exp()
        y, z = (t.repeat_interleave(groups, 1) for t in (y, v[theirs].float()))
        inner = torch.einsum("qhd,khd->hqk", d_o[own], z) - along[own].t()[..., None]
        inner = shares * inner * rule.scale
        dq[own] = torch.einsum("hqk,khd->qhd", inner, y)
        of_keys = torch.einsum("hqk,qhd->khd", inner, x), torch.einsum("hqk,qhd->khd", shares, d_o[own])
        for grad, piece in zip((dk, dv), of_keys, strict=True):
            grad[theirs] = piece.view(len(piece), -1, groups, piece.shape[-1]).sum(2)
    of_sinks = None
    if sinks is not None:
        shares = (sinks[0, :, 0, 0] - stats[..., 0]).exp()
        of_sinks = -(shares * along).sum(0).view_as(sinks)
    return [*(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v), strict=True)), of_sinks]
