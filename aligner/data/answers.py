"""Base of datasets of judged answers: rows of tokens with loss on the answers, and the reference's logprobs."""

from __future__ import annotations

import hashlib

import numpy as np

from aligner.data.items import SftItem
from aligner.data.ragged import FlatRows
from aligner.data.row_reader import DataReport, TokenRows


class Answers(TokenRows):
    """Items of one answer, or of a pair's two, each a row of tokens with its prompt."""

    def __init__(self, report: DataReport):
        super().__init__(report)
        self._mask = FlatRows(np.uint8)
        self.reference: np.ndarray | None = None  # float32 [self.tokens] logprobs, if the stage stores them

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
        """Number of tokens of all rows."""
        return int(self._tokens.offsets[-1])

    def span(self, first: int, end: int) -> slice:
        """Return the range of items `first` to `end` among all tokens."""
        return slice(*map(int, self._tokens.offsets[[self.rows * first, self.rows * end]]))

    def digest(self) -> bytes:
        """Return a hash of all tokens and their loss masks."""
        sha256 = hashlib.sha256(self._tokens.offsets.tobytes())
        for row in range(len(self._tokens)):
            sha256.update(self._tokens[row].tobytes() + self._mask[row].tobytes())
        return sha256.digest()
