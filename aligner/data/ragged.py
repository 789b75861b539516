"""Rows of token ids without a Python list per row."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from typing import IO

import numpy as np

from aligner.errors import DataError

IN_MEMORY = 1 << 28  # bytes of a flat array
CHUNK = 2048  # rows collected before they join it


class FlatRows:
    """Rows of different lengths in one flat array; row i is a view of flat[offsets[i]:offsets[i + 1]].

    Beyond IN_MEMORY bytes the array lies in a temporary file (TMPDIR), mapped into memory: unread rows need none.
    """

    def __init__(self, dtype: type):
        self._dtype = np.dtype(dtype)
        self._new: list[np.ndarray] = []
        self._blocks: list[np.ndarray] = []  # rows, end to end
        self._file: IO[bytes] | None = None  # or rows in a file
        self._lengths: list[np.ndarray] = []

    def append(self, row: Sequence[int]) -> None:
        """Add a row. Raises DataError if there is no room for it."""
        self._new.append(np.asarray(row, dtype=self._dtype))
        if len(self._new) == CHUNK:
            self._pack()

    def _pack(self) -> None:
        if not self._new:
            return
        self._lengths.append(np.fromiter(map(len, self._new), np.int64, len(self._new)))
        self._blocks.append(np.concatenate(self._new))
        self._new = []
        if self._file is not None or sum(block.nbytes for block in self._blocks) > IN_MEMORY:
            try:
                self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the rows)
                self._file.writelines(block.data for block in self._blocks)
                self._file.flush()
            except OSError as error:
                where = f"{tempfile.gettempdir()} (TMPDIR)"
                raise DataError(f"cannot keep the tokens of the data in {where}: {error.strerror}") from error
            self._blocks = []

    @cached_property
    def flat(self) -> np.ndarray:
        """All rows, end to end. After access to this or `offsets` nothing may be appended."""
        self._pack()
        if self._file is not None:
            return np.memmap(self._file, self._dtype, mode="r")
        self._blocks = [np.concatenate([np.zeros(0, self._dtype), *self._blocks])]
        return self._blocks[0]

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [len(self) + 1]."""
        self._pack()
        return np.concatenate([[0], *self._lengths]).cumsum().astype(np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)
