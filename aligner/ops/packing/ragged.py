"""Rows for attention that takes any lengths: the queries of all rows end to end, likewise their keys, and where each
row ends, without padded cells (FlashAttention-2, arXiv:2307.08691, as `torch.nn.attention.varlen`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aligner.ops.packing.pack import Final, Packing


@dataclass(frozen=True)
class Ragged:
    """Keys of a row are its positions from the first to that of its last query, and its queries the last ones of
    them. A causal mask aligned at the lower right corner is right for every row."""

    order: Tensor | None  # int64 [queries]: which query is here; None: they are as in the stream
    back: Tensor | None  # int64 [queries]: the inverse of `order`
    k_index: Tensor | None  # int64 [keys] into the keys; None: they are where the queries are
    cu_q: Tensor  # int32 [rows + 1]: where each row's queries begin, and the end
    cu_k: Tensor
    max_q: int  # queries of the longest row
    max_k: int
    window: int = 0  # tokens that a query sees, itself included; 0: all up to itself

    @property
    def sight(self) -> tuple[int, int]:
        """The keys that a query sees to its left and to its right, besides itself; -1: all."""
        return (self.window - 1 if 0 < self.window < self.max_k else -1), 0


def in_rows(spans, beside: bool = False):
    """Return a `Packing` (before its `additive`) or `Final` with its rows in place of, or `beside`, its segments."""
    segments = {} if beside else {"segments": [], "q_index": None, "out_index": None}
    return replace(spans, ragged=_rows(spans), **segments)


def _rows(spans: Packing | Final) -> Ragged:
    """Return the rows of all segments, in the order of their queries in the stream."""
    if spans.q_index is None:
        (segment,) = spans.segments
        ends = torch.arange(segment.rows + 1, dtype=torch.int32) * segment.q_width
        return Ragged(None, None, None, ends, ends, segment.q_width, segment.k_width)
    real = torch.zeros(len(spans.q_index), dtype=torch.bool)
    real[spans.out_index] = True  # every query of the stream has one cell, and padded cells none
    sizes = [s.rows * s.q_width for s in spans.segments]
    queries, keys = [], []
    for segment, index, filled in zip(spans.segments, spans.q_index.split(sizes), real.split(sizes), strict=True):
        count = filled.view(segment.rows, -1).sum(1)
        queries += index[filled].split(count.tolist())
        if segment.k_index is not None:
            seen = count if segment.q_start is None else count + segment.q_start
            places = segment.k_index.view(segment.rows, -1)
            keys += places[torch.arange(segment.k_width) < seen[:, None]].split(seen.tolist())
    rows = sorted(range(len(queries)), key=lambda row: int(queries[row][0]))
    queries, keys = [queries[row] for row in rows], [keys[row] for row in rows] if keys else []
    order, back = torch.cat(queries), torch.empty(len(spans.out_index), dtype=torch.int64)
    back[order] = torch.arange(len(order))
    straight = torch.equal(order, torch.arange(len(order)))
    cu_q, max_q = _ends(queries)
    cu_k, max_k = _ends(keys or queries)
    return Ragged(
        order=None if straight else order,
        back=None if straight else back,
        k_index=torch.cat(keys) if keys else None,
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=max_q,
        max_k=max_k,
    )


def _ends(parts: list[Tensor]) -> tuple[Tensor, int]:
    lengths = [len(rows) for rows in parts]
    return torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)
