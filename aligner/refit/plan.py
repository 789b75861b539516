"""Which tensors travel in which bucket. Pure: sizes in, buckets out; the same list on every rank."""

from __future__ import annotations

from collections.abc import Sequence


def buckets(sizes_bytes: Sequence[int], limit_bytes: int) -> list[range]:
    """Consecutive tensors whose bytes sum to at most `limit_bytes`; a larger tensor is a bucket of its own."""
    parts, start, total = [], 0, 0
    for i, size in enumerate(sizes_bytes):
        if i > start and total + size > limit_bytes:
            parts.append(range(start, i))
            start, total = i, 0
        total += size
    if start < len(sizes_bytes):
        parts.append(range(start, len(sizes_bytes)))
    return parts
