"""Sliding windows: a query sees the last `window` tokens of its row, itself included (Beltagy et al. 2020,
arXiv:2004.05150; Mistral 7B, arXiv:2310.06825)."""

from __future__ import annotations

from dataclasses import replace

import torch

from aligner.ops.packing.pack import Packing, Segment


def windowed(packing: Packing, window: int) -> Packing:
    """Return the same stream, before `Packing.additive`, for a layer with this window. It costs a mask of q_width x
    k_width for each segment with longer rows, for each of its rows if they start at different positions."""
    final = packing.final
    return replace(_near(packing, window), final=None if final is None else _near(final, window))


def _near(spans, window: int):
    ragged = None if spans.ragged is None else replace(spans.ragged, window=window)
    return replace(spans, segments=[_windowed(segment, window) for segment in spans.segments], ragged=ragged)


def _windowed(segment: Segment, window: int) -> Segment:
    if segment.k_width <= window:
        return segment  # no key is out of any query's sight
    start = torch.zeros(1, dtype=torch.int64) if segment.q_start is None else segment.q_start
    query = start[:, None] + torch.arange(segment.q_width)
    query = query.clamp_max(segment.k_width - 1)[:, None, :, None]  # a padded query sees something, or it would be NaN
    key = torch.arange(segment.k_width)
    return replace(segment, mask=(key <= query) & (key > query - window))
