"""Attention of rows that lie end to end, forward and backward, as cuDNN's kernels define it; for `te_extension.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Ends = list[Tensor]  # of queries and of keys, int32 [rows + 1]


def _rows(ends: Ends, places: Ends) -> Iterator[tuple[slice, slice]]:
    """Where the tokens of each row are: as many as `ends` says, from where `places` says."""
    counts = [e.diff().tolist() for e in ends]
    for count, *begin in zip(zip(*counts, strict=True), *(p[:-1].tolist() for p in places), strict=True):
        yield tuple(slice(b, b + n) for b, n in zip(begin, count, strict=True))


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """[h, q, k] of one row; causal: from the top left."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf) if causal else scores


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, ends: Ends, places: Ends, longest: tuple, causal: bool):
    """The outputs, and log(sum(exp(scores))) [tokens, h, 1]."""
    for e, n, x in zip(ends, longest, (q, k), strict=True):
        assert e.dtype == torch.int32 and e.is_contiguous() and int(e[0]) == 0
        assert int(e.diff().max()) <= n, f"a row of {int(e.diff().max())} tokens, and max_seqlen is {n}"
        assert int(e[-1]) <= len(x), f"rows of {int(e[-1])} tokens, and {len(x)} are here"
    out, stats = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32), torch.zeros(*q.shape[:2], 1)
    for own, theirs in _rows(ends, places):
        scores = _scores(q[own].float(), k[theirs].float(), scale, causal)
        sums = scores.logsumexp(-1, keepdim=True)
        values = v[theirs].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[own] = torch.einsum("hqk,khd->qhd", (scores - sums).exp(), values)
        stats[own] = sums.transpose(0, 1)
    return out.to(q.dtype), stats


def attend_backward(q, k, v, o, d_o, stats, scale: float, ends: Ends, places: Ends, causal: bool) -> list[Tensor]:
    """By the outputs and sums of the whole row, of which these keys may be a part."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    d_o, o, groups = d_o.view(*q.shape[:-1], -1).float(), o.view(*q.shape[:-1], -1).float(), q.shape[1] // k.shape[1]
    for own, theirs in _rows(ends, places):
        x, y = q[own].float(), k[theirs].float()
        shares = (_scores(x, y, scale, causal) - stats[own].transpose(0, 1)).exp()
        y, z = (t.repeat_interleave(groups, 1) for t in (y, v[theirs].float()))
        inner = torch.einsum("qhd,khd->hqk", d_o[own], z) - (d_o[own] * o[own]).sum(-1).t()[..., None]
        inner = shares * inner * scale
        dq[own] = torch.einsum("hqk,khd->qhd", inner, y)
        of_keys = torch.einsum("hqk,qhd->khd", inner, x), torch.einsum("hqk,qhd->khd", shares, d_o[own])
        for grad, piece in zip((dk, dv), of_keys, strict=True):
            grad[theirs] = piece.view(len(piece), -1, groups, piece.shape[-1]).sum(2)
    return [grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v), strict=True)]


def halves(ends: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the first halves of all rows, and of the second halves."""
    first, second = [], []
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        assert (end - begin) % 2 == 0, f"a row of {end - begin} has no halves"
        middle = (begin + end) // 2
        first.append(torch.arange(begin, middle))
        second.append(torch.arange(middle, end))
    return torch.cat(first), torch.cat(second)
