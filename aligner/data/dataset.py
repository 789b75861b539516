"""Datasets of token ids, built once from typed rows."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from aligner.config.sections.data import DataConfig
from aligner.data.answers import Answers
from aligner.data.formats import PreferenceRow, PromptRow, ScoredRow, SftRow
from aligner.data.items import PairItem, PreferenceItem, ScoredItem, SftItem
from aligner.data.ragged import FlatRows
from aligner.data.row_reader import DataReport, RowReader, TokenRows
from aligner.data.templates import encode_answers, encode_prompts, encode_sft, replacement_in_use
from aligner.data.tokenizer import stop_token_ids
from aligner.errors import DataError
from aligner.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SftDataset(TokenRows):
    """Conversations and completions to learn.

    Rows longer than data.max_tokens are dropped, or lose their end (data.overlong).

    Raises DataError if no row is left, and the errors of `templates.encode_sft`.
    """

    def __init__(
        self,
        rows: Sequence[SftRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        reading, limit = RowReader(rows, tokenizer, data, key), data.max_tokens
        super().__init__(reading.report)
        self._mask = FlatRows(np.uint8)
        self._teacher_index: list[int | None] = []
        fix = data.chat_template == "auto"
        for chunk in reading.chunks(lambda row: row.texts):
            other = replacement_in_use(tokenizer, chunk) if fix and data.loss_on != "all" else None
            if other is not None:
                self.report.note(
                    f"learns answers with {other.name}, because the tokenizer's own template renders them unlike they "
                    f"are generated (data.chat_template)"
                )
            encoded = encode_sft(tokenizer, chunk, data.loss_on, data.template_arguments, fix, reading.modes)
            texts = reading.learned(encoded)
            for row, (tokens, mask) in zip(chunk, texts, strict=True):
                # a row whose answer is cut off entirely has nothing to learn
                if reading.fits(tokens, learns=any(mask[:limit])):
                    self._tokens.append(tokens[:limit])
                    self._mask.append(mask[:limit])
                    self._teacher_index.append(row.teacher_index)

    def __getitem__(self, index: int) -> SftItem:
        return SftItem(self._tokens[index], self._mask[index], teacher_index=self._teacher_index[index])


class PreferenceDataset:
    """Pairs of texts for a reward model.

    A pair is dropped if one of its texts is longer than data.max_tokens. With data.overlong=truncate both lose their
    ends, unless the pair then has no difference left.
    """

    def __init__(
        self,
        rows: Sequence[PreferenceRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        reading, limit = RowReader(rows, tokenizer, data, key), data.max_tokens
        self.report = reading.report
        self._chosen, self._rejected = FlatRows(np.int32), FlatRows(np.int32)
        margins, equal, stop, fix = [], 0, stop_token_ids(tokenizer), data.chat_template == "auto"
        for chunk in reading.chunks(lambda row: (row.prompt, row.chosen, row.rejected)):
            prompts, where = [row.prompt for row in chunk], [row.where for row in chunk]
            answers = [*(row.chosen for row in chunk), *(row.rejected for row in chunk)]
            tools = [row.tools for row in chunk] * 2
            texts = encode_answers(  # a prompt twice, encoded once
                tokenizer, prompts * 2, answers, where * 2, stop, tools, data.template_arguments, fix
            )
            for row, chosen, rejected in zip(chunk, texts, texts[len(chunk) :], strict=False):
                if reading.fits(chosen, rejected, learns=chosen[:limit] != rejected[:limit]):
                    self._chosen.append(chosen[:limit])
                    self._rejected.append(rejected[:limit])
                    margins.append(row.margin or 0.0)
                    equal += chosen == rejected
        self._margins = np.asarray(margins, dtype=np.float32)
        _tell_equal(equal, len(margins), self.report)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> PreferenceItem:
        return PreferenceItem(self._chosen[index], self._rejected[index], float(self._margins[index]))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per pair, both texts together."""
        return self._chosen.lengths + self._rejected.lengths


class PairDataset(Answers):
    """Pairs whose answers a policy learns from, with loss masks as in `SftDataset`.

    A pair is dropped if one of its texts is longer than data.max_tokens. With data.overlong=truncate both lose their
    ends, unless an answer then has no token left, or the pair no difference. Equal answers stay: they have no gradient,
    and their share is a metric.

    Raises DataError for an answer without text (data.empty_answers), and for different prompts of the two answers.
    """

    rows = 2

    def __init__(
        self,
        rows: Sequence[PreferenceRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        reading, limit = RowReader(rows, tokenizer, data, key), data.max_tokens
        super().__init__(reading.report)
        numbers, equal, fix = [], 0, data.chat_template == "auto"
        for chunk in reading.chunks(lambda row: (row.prompt, row.chosen, row.rejected)):
            chunk = [r for r in chunk if reading.answered(r.where, chosen=r.chosen, rejected=r.rejected)]
            answers = [
                SftRow(prompt=row.prompt, completion=x, where=row.where, tools=row.tools)
                for row in chunk
                for x in (row.chosen, row.rejected)
            ]
            options = data.template_arguments
            texts = reading.learned(encode_sft(tokenizer, answers, arguments=options, fix=fix, modes=reading.modes))
            for row, chosen, rejected in zip(chunk, texts[0::2], texts[1::2], strict=True):
                _check_prompt(row, chosen, rejected)
                learns = (
                    any(chosen[1][:limit]) and any(rejected[1][:limit]) and chosen[0][:limit] != rejected[0][:limit]
                )
                if reading.fits(chosen[0], rejected[0], learns=learns):
                    self._append(*chosen, limit)
                    self._append(*rejected, limit)
                    equal += chosen[0] == rejected[0]
                    named = (row.numbers.get(name, 0.0) for name in ("chosen_reward", "rejected_reward"))
                    numbers.append((row.margin or 0.0, *named, row.numbers.get("weight", 1.0)))
        self._numbers = np.asarray(numbers, dtype=np.float32).reshape(-1, 4)
        _tell_equal(equal, len(numbers), self.report)

    def __getitem__(self, index: int) -> PairItem:
        a, b = 2 * index, 2 * index + 1
        reference = None if self.reference is None else (self._stored(a), self._stored(b))
        return PairItem(self._row(a), self._row(b), *map(float, self._numbers[index]), reference)


class ScoredDataset(TokenRows):
    """Texts with target scores, for a regression reward model; over-long texts as in SftDataset."""

    def __init__(
        self,
        rows: Sequence[ScoredRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        reading, limit = RowReader(rows, tokenizer, data, key), data.max_tokens
        super().__init__(reading.report)
        scores, stop, fix = [], stop_token_ids(tokenizer), data.chat_template == "auto"
        for chunk in reading.chunks(lambda row: (row.prompt, row.completion)):
            prompts, where = [row.prompt for row in chunk], [row.where for row in chunk]
            tools, answers = [row.tools for row in chunk], [row.completion for row in chunk]
            texts = encode_answers(tokenizer, prompts, answers, where, stop, tools, data.template_arguments, fix)
            for row, tokens in zip(chunk, texts, strict=True):
                if reading.fits(tokens):
                    self._tokens.append(tokens[:limit])
                    scores.append(row.scores)
        self._scores = np.asarray(scores, dtype=np.float32)

    def __getitem__(self, index: int) -> ScoredItem:
        return ScoredItem(self._tokens[index], self._scores[index])


class PromptDataset(TokenRows):
    """Prompts to generate from.

    Longer ones than data.max_prompt_tokens are dropped. With data.overlong=truncate texts keep their last tokens, and
    their BOS. A conversation is never cut: its template's beginning would be lost.

    `Prompt.id` is the row number in the file, dropped rows counted; `ids` has those of the kept rows. A column that
    only other rows have is None. A prompt is made on access from a stored copy of its row: files may be larger than
    memory, and may change during the run.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
        values: np.ndarray | None = None,
    ):
        """Take float64 `values` of all rows, if any: rows with NaN are left out, `self.values` are the others'."""
        reading, limit = RowReader(rows, tokenizer, data, key, "max_prompt_tokens"), data.max_prompt_tokens
        super().__init__(reading.report)
        self._rest = FlatRows(np.uint8)
        self._columns: dict[str, None] = {}
        numbers, kept, conversations = count(), array("q"), False
        for chunk in reading.chunks(lambda row: (row.prompt,)):
            self._columns |= {name: None for row in chunk for name in row.fields}
            where, tools = [row.where for row in chunk], [row.tools for row in chunk]
            conversations |= any(not isinstance(row.prompt, str) for row in chunk)
            ids = encode_prompts(tokenizer, [row.prompt for row in chunk], where, tools, data.template_arguments)
            ids, whole = [_last(tokens, limit, tokenizer.bos_token_id) for tokens in ids], ids
            texts = tokenizer.batch_decode(ids, skip_special_tokens=False)
            for row, tokens, every, text, number in zip(chunk, ids, whole, texts, numbers, strict=False):
                if not every:
                    raise DataError(
                        f"{row.where}: expected a prompt of at least one token, found {row.prompt!r} ({key})"
                    )
                if values is not None and np.isnan(values[number]):
                    self.report.left_out += 1
                elif reading.fits(every, learns=isinstance(row.prompt, str)):
                    kept.append(number)
                    messages = None if isinstance(row.prompt, str) else tuple(row.prompt)
                    # a pickle, because columns may hold Parquet's types; only this class writes and reads it
                    rest = pickle.dumps((row.where, number, text, row.fields, messages))
                    self._tokens.append(tokens)
                    self._rest.append(np.frombuffer(rest, np.uint8))
        self.ids = np.array(kept, dtype=np.int64)
        self.values = None if values is None else values[self.ids]
        if conversations and reading.cut and self.report.dropped:
            self.report.note("conversations are dropped, not truncated: the template's beginning would be lost")

    def __getitem__(self, index: int) -> Prompt:
        _, number, text, fields, messages = pickle.loads(self._rest[index])
        return Prompt(number, tuple(self._tokens[index].tolist()), text, {**self._columns, **fields}, messages)

    def where(self, index: int) -> str:
        """Return `file, row n` of a prompt."""
        return pickle.loads(self._rest[index])[0]


def _last(tokens: list[int], limit: int, bos: int | None) -> list[int]:
    """Return at most `limit` tokens: the last ones, behind the text's BOS if it has one."""
    if len(tokens) <= limit:
        return tokens
    head = tokens[:1] if tokens[0] == bos and limit > 1 else []
    return head + tokens[len(head) - limit :]


def _tell_equal(equal: int, pairs: int, report: DataReport) -> None:
    """Note equal answers in the report. Raises DataError if no pair has two different answers."""
    if equal and equal == pairs:
        expected = "at least one pair with different answers"
        raise DataError(
            f"{report.key}: expected {expected}, but all {pairs} pairs have equal answers: nothing can be learned"
        )
    if equal:
        report.note(f"{equal} pairs have equal answers: they have no gradient")


def _check_prompt(row: PreferenceRow, chosen: tuple[list[int], list[int]], rejected: tuple[list[int], list[int]]):
    """Check that (tokens, loss mask) of both answers are equal before the first token with loss."""
    ends = [mask.index(1) for _, mask in (chosen, rejected)]
    if ends[0] != ends[1] or chosen[0][: ends[0]] != rejected[0][: ends[1]]:
        raise DataError(
            f"{row.where}: expected `chosen` and `rejected` to answer the same prompt, found different tokens before "
            f"the answers, {ends[0]} and {ends[1]} of them (add a column `prompt`, the same first messages, or "
            "thoughts to both)"
        )
