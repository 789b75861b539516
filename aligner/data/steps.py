"""Answers in steps, for a process reward model.

Each step is followed by a separator; its score is read at the separator's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from aligner.config.sections.data import DataConfig
from aligner.data.formats import StepsRow
from aligner.data.items import StepsItem
from aligner.data.ragged import FlatRows
from aligner.data.row_reader import RowReader, TokenRows
from aligner.data.templates import encode_behind, encode_prompts
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StepEncoder:
    """A tokeniser of single steps, so that a step has the same tokens in training and in scored answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator: str):
        self.tokenizer, self.separator = tokenizer, separator
        (self._end,) = encode_behind(tokenizer, [separator])
        if not self._end:
            expected = "a text with at least one token"
            raise ConfigError("algorithm.reward_loss.separator", separator, expected)

    def encode(self, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return (tokens of all steps, the index of each step's last separator token)."""
        tokens: list[int] = []
        ends = []
        for step in encode_behind(self.tokenizer, steps):
            tokens += [*step, *self._end]
            ends.append(len(tokens) - 1)
        return tokens, ends

    def steps_of(self, answer: str) -> list[str]:
        """Return the texts between separators that are not blank."""
        return [step for step in answer.split(self.separator) if step.strip()]


class StepsDataset(TokenRows):
    """Answers in steps with labels. Rows longer than data.max_tokens are dropped, or lose their last steps
    (data.overlong)."""

    def __init__(
        self,
        rows: Sequence[StepsRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        separator: str,
        last_step_only: bool = False,
        key: str = "data.train",
    ):
        reading, limit, encoder = (
            RowReader(rows, tokenizer, data, key),
            data.max_tokens,
            StepEncoder(tokenizer, separator),
        )
        super().__init__(reading.report)
        self._labels = FlatRows(np.float32)
        for chunk in reading.chunks(lambda row: (row.prompt,)):
            where, tools = [row.where for row in chunk], [row.tools for row in chunk]
            prompts = encode_prompts(tokenizer, [row.prompt for row in chunk], where, tools, data.template_arguments)
            for row, prompt in zip(chunk, prompts, strict=True):
                steps, ends = encoder.encode(row.steps)
                labels = np.full(len(prompt) + len(steps), np.nan, dtype=np.float32)
                first = len(ends) - 1 if last_step_only else 0
                labels[[len(prompt) + end for end in ends[first:]]] = row.labels[first:]
                if reading.fits([*prompt, *steps], learns=not np.isnan(labels[:limit]).all()):
                    self._tokens.append([*prompt, *steps][:limit])
                    self._labels.append(labels[:limit])

    def __getitem__(self, index: int) -> StepsItem:
        return StepsItem(self._tokens[index], self._labels[index])
