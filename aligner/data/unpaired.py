"""Single answers with labels, each with its mismatched answer for stage kto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from aligner.config.sections.data import DataConfig
from aligner.data.answers import Answers
from aligner.data.formats import SftRow, UnpairedRow
from aligner.data.items import SftItem, UnpairedItem
from aligner.data.row_reader import RowReader
from aligner.data.templates import encode_sft
from aligner.ops.rl.kto import mismatched

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class UnpairedDataset(Answers):
    """Answers behind their prompts, with labels, and loss masks as in `SftDataset`.

    Rows longer than data.max_tokens are dropped, or lose their end.

    Raises DataError for an answer without text (data.empty_answers).
    """

    def __init__(
        self,
        rows: Sequence[UnpairedRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        reading, limit = RowReader(rows, tokenizer, data, key), data.max_tokens
        super().__init__(reading.report)
        labels, fix = [], data.chat_template == "auto"
        for chunk in reading.chunks(lambda row: (row.prompt, *(answer for _, answer, _ in row.answers))):
            self.report.rows += sum(len(row.answers) - 1 for row in chunk)
            answers = [
                (row, answer, label)
                for row in chunk
                for column, answer, label in row.answers
                if reading.answered(row.where, **{column: answer})
            ]
            texts = [SftRow(prompt=r.prompt, completion=x, where=r.where, tools=r.tools) for r, x, _ in answers]
            options = data.template_arguments
            encoded = reading.learned(encode_sft(tokenizer, texts, arguments=options, fix=fix, modes=reading.modes))
            for (*_, label), (tokens, mask) in zip(answers, encoded, strict=True):
                if reading.fits(tokens, learns=any(mask[:limit])):
                    self._append(tokens, mask, limit)
                    labels.append(label)
        if self.report.rows > len(rows):
            self.report.note("pairs are split into their answers")
        self.desirable = np.asarray(labels, dtype=bool)

    def __getitem__(self, index: int) -> UnpairedItem:
        reference = None if self.reference is None else self._stored(index)
        return UnpairedItem(self._row(index), bool(self.desirable[index]), reference)


def with_mismatched(items: Sequence[UnpairedItem], own: Sequence[int], limit: int) -> list[UnpairedItem]:
    """Return the items with indices `own`, each with its mismatched answer from the order of all `items`.

    It is cut to `limit` tokens with its prompt, and absent if all items have the same prompt.
    """
    others = mismatched([item.prompt.tobytes() for item in items])
    if others is None:
        return [items[i] for i in own]
    return [items[i]._replace(mismatched=_after(items[i].prompt, items[others[i]].answer, limit)) for i in own]


def _after(prompt: np.ndarray, other: SftItem, limit: int) -> SftItem:
    tokens = np.concatenate([prompt, other.tokens[other.start :]])
    mask = np.concatenate([np.zeros(len(prompt), np.uint8), other.loss_mask[other.start :]])
    return SftItem(tokens[:limit], mask[:limit])
