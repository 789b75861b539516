"""What datasets of judged answers share: rows of tokens of which the answers are learned, and what a reference says."""

from __future__ import annotations

import hashlib

import numpy as np

from aligner.data.items import SftItem
from aligner.data.ragged import FlatRows
from aligner.data.reading import DataReport, TokenRows


class Answers(TokenRows):
    """Items of one answer, or of two in a pair, each a row of tokens behind its prompt."""

    def __init__(self, report: DataReport):
        super().__init__(report)
        self._mask = FlatRows(np.uint8)
        self.reference: np.ndarray | None = None  # float32 [self.tokens] logprobs, where the stage stores them

    def _append(self, tokens: list[int], mask: list[int], limit: int) -> None:
        self._tokens.append(tokens[:limit])
        self._mask.append(mask[:limit])

    def _row(self, row: int) -> SftItem:
        return SftItem(self._tokens[row], self._mask[row])

    def _stored(self, row: int) -> np.ndarray:
        assert self.reference is not None
        return self.reference[slice(*self._tokens.offsets[[row, row + 1]])]

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return int(self._tokens.offsets[-1])

    def span(self, first: int, end: int) -> slice:
        """Where items `first` to `end` stand among all tokens."""
        return slice(*map(int, self._tokens.offsets[[self.rows * first, self.rows * end]]))

    def digest(self) -> bytes:
        """Of all tokens and what of them is learned."""
        found = hashlib.sha256(self._tokens.offsets.tobytes())
        for row in range(len(self._tokens)):
            found.update(self._tokens[row].tobytes() + self._mask[row].tobytes())
        return found.digest()
