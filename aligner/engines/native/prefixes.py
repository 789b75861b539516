"""Ended rows that may continue. Their keys and values stay in free slots of the cache until a running row needs these.
A prompt that begins with them is prefilled from there on.

Rows are matched by content, a block of tokens at a time. When slots run out, the pool chooses the row to forget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK = 16  # tokens


class Prefix(NamedTuple):
    """A prompt's first `length` tokens, which are those of `row`."""

    row: int
    length: int


class HeldRow(NamedTuple):
    tokens: tuple[int, ...]  # that were fed
    slot: int


@dataclass
class Prefixes:
    slots: int
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of running rows
    _rows: dict[int, HeldRow] = field(default_factory=dict)  # the oldest first
    _blocks: dict[int, list[int]] = field(default_factory=dict)  # hash of the first blocks -> rows that have them

    def slot(self, row: int) -> int:
        return self._rows[row].slot

    @property
    def longest(self) -> int:
        return max((len(held.tokens) for held in self._rows.values()), default=0)

    def keep(self, row: int, response: Sequence[int], slot: int) -> int:
        """Keep a row whose prompt and `response`, but for its last token, which was never fed, are in this slot.
        Return their number of tokens."""
        held = HeldRow((*self.prompts.pop(row), *response[:-1]), slot)
        self._rows[row] = held
        for block in _blocks(held.tokens):
            self._blocks.setdefault(block, []).append(row)
        return len(held.tokens)

    def find(self, tokens: Sequence[int]) -> Prefix | None:
        """Return the longest prefix that leaves at least a token, if it is at least half of the prompt. A shorter
        one would save little, and chunks of prompts with and without a prefix have other shapes."""
        if not self._rows:
            return None
        prompt, length, rows = tuple(tokens[:-1]), 0, []
        for block in _blocks(prompt):
            if block not in self._blocks:
                break
            length, rows = length + BLOCK, self._blocks[block]
        prefixes = [Prefix(row, _common(self._rows[row].tokens, prompt, length)) for row in rows]
        best = max(prefixes, key=lambda prefix: prefix.length, default=Prefix(0, 0))
        return best if 2 * best.length >= len(tokens) else None

    def used(self, prefix: Prefix) -> None:
        """Forget a row that another one continues."""
        if prefix.row in self._rows and len(self._rows[prefix.row].tokens) == prefix.length:
            self._forget(prefix.row)

    def make_way(self, stop: int, least: Callable[[Sequence[int]], int]) -> list[tuple[int, int]]:
        """Free slots [0, stop) for running rows; return the moves of kept rows, (from, to) each. Without free slots,
        forget the row that `least` chooses; it gets them in the order in which they ended."""
        while len(self._rows) > self.slots - stop:
            self.forget(least)
        free = set(range(stop, self.slots)).difference(self.kept_slots)
        moves = []
        for row, held in self._rows.items():
            if held.slot < stop:
                target = min(free)
                free.remove(target)
                moves.append((held.slot, target))
                self._rows[row] = held._replace(slot=target)
        return moves

    def forget(self, least: Callable[[Sequence[int]], int]) -> None:
        """Forget the row that `least` chooses. There has to be one."""
        self._forget(least(list(self._rows)))

    @property
    def kept_slots(self) -> list[int]:
        return [held.slot for held in self._rows.values()]

    def _forget(self, row: int) -> None:
        for block in _blocks(self._rows.pop(row).tokens):
            self._blocks[block].remove(row)
            if not self._blocks[block]:
                del self._blocks[block]


def _blocks(tokens: tuple[int, ...]) -> list[int]:
    """Return for each whole block a hash of it and of all before it."""
    hashes = [0]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1], tokens[start : start + BLOCK])))
    return hashes[1:]


def _common(held: tuple[int, ...], prompt: tuple[int, ...], length: int) -> int:
    """Return how many of the first tokens are the same, where hashes say that `length` are."""
    if held[:length] != prompt[:length]:
        return 0
    while length < min(len(held), len(prompt)) and held[length] == prompt[length]:
        length += 1
    return length
