"""Plain documents for continued pre-training, end to end in rows of equal length; and the datasets of stage sft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import SftDataset
from aligner.data.formats import TeacherOf, TextRow, TypedRows, no_teacher, sft_rows, text_rows
from aligner.data.items import SftItem
from aligner.data.ragged import FlatRows
from aligner.data.row_reader import CHUNK, DataReport
from aligner.data.templates import encode_documents
from aligner.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextDataset(Sequence):
    """Documents end to end: row i has the tokens from i * data.max_tokens on.

    A document that does not fit continues in the next row. The last row has the rest (two tokens at least). Each
    document ends with EOS. Loss is on all tokens but the first of a row and, unless data.across_documents, the first of
    a document.
    """

    def __init__(
        self, rows: Sequence[TextRow], tokenizer: PreTrainedTokenizerBase, data: DataConfig, key: str = "data.train"
    ):
        self._width, self._across = data.max_tokens, data.across_documents
        self.report = DataReport(key, f"data.max_tokens={data.max_tokens}", rows=len(rows))
        for note in rows.notes if isinstance(rows, TypedRows) else ():
            self.report.note(note)
        self._documents = FlatRows(np.int32)
        for start in range(0, len(rows), CHUNK):
            texts = [row.text for row in rows[start : start + CHUNK]]
            for tokens in encode_documents(tokenizer, [text for text in texts if text]):
                self._documents.append(tokens)
        self.report.kept = len(self._documents)
        self._total = int(self._documents.offsets[-1])
        if self._total < 2:
            raise DataError(f"{key}: expected documents with text, found {len(rows)} empty documents")
        self._total -= self._total % self._width == 1
        self.report.note(f"{self._total} tokens an epoch, in {len(self)} rows of data.max_tokens={self._width}")
        if empty := len(rows) - self.report.kept:
            self.report.note(f"{empty} empty documents left out")

    def __len__(self) -> int:
        return -(-self._total // self._width)

    def __getitem__(self, index: int) -> SftItem:
        start = range(len(self))[index] * self._width
        positions = np.arange(start, min(start + self._width, self._total))
        tokens, mask = self._documents.flat[start : start + len(positions)], np.ones(len(positions), dtype=np.uint8)
        mask[0] = 0
        if self._across:
            return SftItem(tokens, mask)
        documents = np.searchsorted(self._documents.offsets, positions, side="right")
        mask[1:] = documents[1:] == documents[:-1]
        return SftItem(tokens, mask, documents)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per row."""
        starts = np.arange(len(self), dtype=np.int64) * self._width
        return np.minimum(self._width, self._total - starts)


def sft_dataset(
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    key: str,
    teacher_of: TeacherOf = no_teacher,
) -> SftDataset | TextDataset:
    """Return the dataset of stage sft from rows of a file."""
    if data.format == "text":
        return TextDataset(text_rows(rows, data), tokenizer, data, key)
    return SftDataset(sft_rows(rows, data, teacher_of), tokenizer, data, key)
