"""The pages of running rows: which pages of a pool hold a row's tokens, in order. Rows get pages as they grow.

Samples of a prompt share the pages that it fills: those are not written again. A page whose last row has left is free.
Where rows are whole a slot is its own page, and nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int, int]  # page, first position of a row, and the one behind its last


class PoolShape(NamedTuple):
    slots: int
    pages: int
    tokens: int  # of a page
    row_pages: int = 1  # of the longest row; 1: rows are whole

    @property
    def row_tokens(self) -> int:
        return self.row_pages * self.tokens


class PageTable:
    """`pages` int64 [slots, row_pages] is on the device: 0 where a row has none. Page 0 is of no row, so that what is
    computed beside the running rows can be written there."""

    def __init__(self, shape: PoolShape, device: torch.device):
        self.shape, self.whole = shape, shape.row_pages == 1
        own = torch.arange(shape.slots)[:, None] if self.whole else torch.zeros(shape.slots, shape.row_pages).long()
        self._host, self.pages = own, own.to(device)
        self.clear()

    def renewed(self, shape: PoolShape) -> PageTable:
        """Return an empty table of this shape: this one, at its address, if that is its shape."""
        if shape != self.shape:
            return PageTable(shape, self.pages.device)
        self.clear()
        return self

    def clear(self) -> None:
        """Free all pages."""
        self._rows: list[list[int]] = [[] for _ in range(self.shape.slots)]
        self._users = [0] * self.shape.pages
        self._free = [] if self.whole else list(range(self.shape.pages - 1, 0, -1))
        if not self.whole:
            self._host.zero_()
        self._changed = True
        self._upload()

    @property
    def free(self) -> int:
        return len(self._free)

    def usage(self, active: int) -> float:
        """Return the share of the pool's pages that rows have, of which so many run."""
        return active / self.shape.pages if self.whole else 1 - self.free / (self.shape.pages - 1)

    def admit(self, first: int, count: int, length: int, again: int = 0) -> list[Span]:
        """Give slots [first, first + count), the same `length` tokens, whose last `again` each will write anew. Return
        the pages to fill."""
        slots, tokens = range(first, first + count), self.shape.tokens
        if self.whole:
            return [(slot, 0, length) for slot in slots]
        self.drop(slots)
        full = (length - again) // tokens
        shared = [self._free.pop() for _ in range(full)]
        spans = [(page, i * tokens, (i + 1) * tokens) for i, page in enumerate(shared)]
        for slot in slots:
            own = [self._free.pop()] if length > full * tokens else []
            spans += [(page, full * tokens, length) for page in own]
            for page in (*shared, *own):
                self._users[page] += 1
            self._assign(slot, shared + own)
        self._upload()
        return spans

    def grow(self, positions: Tensor) -> bool:
        """Give slots [0, n) pages up to these positions, int64 [n] on the CPU; return whether there are enough. The
        table is on the device afterwards."""
        if not self.whole:
            numbers = (positions // self.shape.tokens).tolist()
            lacking = {slot: n for slot, last in enumerate(numbers) if (n := last + 1 - len(self._rows[slot])) > 0}
            if sum(lacking.values()) > self.free:
                return False
            for slot, count in lacking.items():
                pages = [self._free.pop() for _ in range(count)]
                for page in pages:
                    self._users[page] = 1
                self._assign(slot, self._rows[slot] + pages)
            self._upload()
        return True

    def _upload(self) -> None:
        if self._changed and self.pages is not self._host:
            self.pages.copy_(self._host, non_blocking=True)
        self._changed = False

    def count(self, slot: int) -> int:
        """Return how many pages a slot has."""
        return len(self._rows[slot])

    def growing(self, active: int) -> int:
        """Return how many of slots [0, active) may need more pages."""
        return sum(len(pages) < self.shape.row_pages for pages in self._rows[:active])

    def spans(self, slot: int, length: int) -> list[Span]:
        """Return the pages of a slot's first `length` tokens."""
        tokens = self.shape.tokens
        pages = [slot] if self.whole else self._rows[slot][: -(-length // tokens)]
        return [(page, i * tokens, min(length, (i + 1) * tokens)) for i, page in enumerate(pages)]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Move the pages of slots `source` to slots `target`, all at once. Those that stood there are freed."""
        rows = [self._rows[slot] for slot in source]
        self.drop(set(target) - set(source))
        for slot in source:
            self._assign(slot, [])
        for slot, pages in zip(target, rows, strict=True):
            self._assign(slot, pages)

    def drop(self, slots: Iterable[int]) -> None:
        """Free the pages of these slots."""
        for slot in sorted(slots):
            for page in self._rows[slot]:
                self._users[page] -= 1
                if not self._users[page]:
                    self._free.append(page)
            if self._rows[slot]:
                self._assign(slot, [])

    def _assign(self, slot: int, pages: list[int]) -> None:
        self._rows[slot], self._changed = pages, True
        self._host[slot] = 0
        self._host[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int64)
