"""Typed rows of a file on their way into a dataset: which of them fit, and a report of the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from aligner.config.sections.data import DataConfig
from aligner.data.answer_ends import AnswerEnds, spans
from aligner.data.chats import check_arguments, unread_tools
from aligner.data.formats import Messages, SftRow, Text, Tools, TypedRows
from aligner.data.opened_modes import OpenedModes
from aligner.data.ragged import FlatRows
from aligner.data.template_checks import loses_thoughts, shows_beside, shows_key, thinking
from aligner.data.templates import replacement_in_use
from aligner.data.tokenizer import stop_token_ids
from aligner.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDERED = {"role", "content", "tool_calls"}  # keys of a message that a template must show
CHUNK = 2048  # rows tokenised by one call: bounds the memory for lists


@dataclass
class DataReport:
    """Counts of the rows of a file. Truncated rows are among the `kept`."""

    key: str
    limit: str
    rows: int = 0
    kept: int = 0
    dropped: int = 0
    cut: array = field(default_factory=lambda: array("q"))  # items, in order, that lost their end
    empty: int = 0
    left_out: int = 0
    conversations: bool = False  # some rows are conversations
    notes: list[str] = field(default_factory=list)

    @property
    def truncated(self) -> int:
        return len(self.cut)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        text = f"{self.key}: {self.rows} rows, {self.kept} kept"
        if self.dropped or self.truncated:
            text += f", {self.dropped} dropped and {self.truncated} truncated by {self.limit}"
        if self.left_out:
            text += f", {self.left_out} outside curriculum.bounds"
        if self.empty:
            text += f", {self.empty} dropped whose answer has no text (data.empty_answers=drop)"
        return "; ".join([text, *self.notes])


class TokenRows:
    """Items of one or several rows of tokens, and the report on their source rows."""

    rows: ClassVar[int] = 1  # of an item

    def __init__(self, report: DataReport):
        self.report, self._tokens = report, FlatRows(np.int32)

    def __len__(self) -> int:
        return len(self._tokens) // self.rows

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per item."""
        return self._tokens.lengths.reshape(-1, self.rows).sum(1)


class RowReader[Row]:
    """A reader of typed rows. Raises DataError if no row is left, ConfigError for an argument that the chat template
    lacks."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str,
        limit_key: str = "max_tokens",
    ):
        self.rows, self.tokenizer, self.data = rows, tokenizer, data
        self.limit, self.cut = getattr(data, limit_key), data.overlong == "truncate"
        self.report = DataReport(key, f"data.{limit_key}={self.limit}", rows=len(rows))
        self._shortest: int | None = None
        self.modes = OpenedModes()
        self._ends: AnswerEnds | None = None
        self._learned = self._open = 0  # answers, and those without a stop token
        self._keys: dict[tuple[str, str], None] = {}  # of messages, with their role
        self._beside = 0  # rows whose text beside calls the template omits
        self._thoughtless = 0  # rows of which the template omits thoughts
        self._loses: dict[Hashable, bool] = {}  # by shape
        self._shows_beside: dict[bool, bool] = {}  # with tools, and without: the template may differ
        for note in rows.notes if isinstance(rows, TypedRows) else ():
            self.report.note(note)

    def chunks(self, texts: Callable[[Row], Sequence[Text]]) -> Iterator[Sequence[Row]]:
        """Yield CHUNK rows at a time. `texts`: of a row, all strings or all messages."""
        for first in range(0, len(self.rows), CHUNK):
            chunk = self.rows[first : first + CHUNK]
            chats = [[m for text in texts(row) if not isinstance(text, str) for m in text] for row in chunk]
            if any(chats):
                self.report.conversations = True
                for row, messages in zip(chunk, chats, strict=True):
                    self._note_keys(messages)
                    self._beside += self._loses_words(messages, row.tools)
                    if isinstance(row, SftRow):
                        self._thoughtless += self._loses_thoughts(row, messages)
                check_arguments(self.tokenizer, self.data.template_arguments)
                if unread_tools(self.tokenizer, [row.tools for row in chunk]):
                    self.report.note("the column `tools` has no effect: the chat template does not read it")
            yield chunk
        for note in self.modes.notes(self.report.key):
            self.report.note(note)
        if self._open:
            self.report.note(
                f"{self._open} of {self._learned} answers are learned without an end token: the chat template puts no "
                "stop token there, so generation may not stop after such an answer (data.chat_template)"
            )
        if self._beside:
            self.report.note(
                f"the chat template leaves out the text beside tool calls, in {self._beside} rows: only the calls are "
                "read and learned there. To learn both: a template that shows both (data.chat_template)"
            )
        if self._thoughtless:
            self.report.note(
                f"the chat template leaves out thoughts of responses, in {self._thoughtless} rows: these are learned "
                "without (data.chat_template)"
            )
        self._check_left()

    def _loses_thoughts(self, row: SftRow, messages: Messages) -> bool:
        """`messages`: all of the row's."""
        where, split = thinking(messages), None if row.messages is not None else len(row.prompt)
        shape = tuple((m["role"], where.get(i), "tool_calls" in m) for i, m in enumerate(messages))
        shape = shape, split, bool(row.tools)
        if where and shape not in self._loses:
            data, options = self.data, self.data.template_arguments
            fix = data.chat_template == "auto" and data.loss_on != "all"
            lost = loses_thoughts(self.tokenizer, messages, options, row.tools)
            if lost and fix and (other := replacement_in_use(self.tokenizer, [row])) is not None:
                lost = loses_thoughts(self.tokenizer, messages, {**other.options, **options}, row.tools)
            self._loses[shape] = lost
        return bool(where) and self._loses[shape]

    def _loses_words(self, messages: Messages, tools: Tools | None) -> bool:
        if not any(message.get("tool_calls") and message["content"].strip() for message in messages):
            return False
        if bool(tools) not in self._shows_beside:
            shows = shows_beside(self.tokenizer, self.data.template_arguments, tools)
            self._shows_beside[bool(tools)] = shows
        return not self._shows_beside[bool(tools)]

    def _note_keys(self, messages: Messages) -> None:
        """Note each key of the messages, besides role and content, that the template leaves out, once."""
        pairs = {(m["role"], key) for m in messages for key in m.keys() - RENDERED}
        for role, key in sorted(pairs - self._keys.keys()):
            self._keys[role, key] = None
            if not shows_key(self.tokenizer, role, key, self.data.template_arguments):
                self.report.note(f"the chat template leaves out `{key}` of role {role}")

    def learned(self, texts: Sequence[tuple[list[int], list[int]]]) -> Sequence[tuple[list[int], list[int]]]:
        """Return the same (tokens, loss mask) of rows; count answers without a stop token."""
        self._ends = self._ends or AnswerEnds(self.tokenizer, stop_token_ids(self.tokenizer))
        for tokens, mask in texts:
            for start, end in spans(mask):
                self._learned += 1
                self._open += not self._ends.ended(tokens, start, end)
        return texts

    def answered(self, where: str, **answers: Text) -> bool:
        """Return whether all answers of a row, by column, have some text.

        Else drop and count the row with data.empty_answers=drop. Raises DataError.
        """
        for name, answer in answers.items():
            turns = [] if isinstance(answer, str) else [m for m in answer if m["role"] == "assistant"]
            contents = [answer] if isinstance(answer, str) else [m["content"] for m in turns]
            if any(text.strip() for text in contents) or any("tool_calls" in m for m in turns):
                continue
            if self.data.empty_answers == "refuse":
                raise DataError(
                    f"{where}: expected an answer with some text in `{name}`, found {answer!r:.120}. To drop "
                    "such rows: data.empty_answers=drop"
                )
            self.report.empty += 1
            return False
        return True

    def fits(self, *texts: Sequence[int], learns: bool = True) -> bool:
        """Count a row of these tokens in the report; return whether it is kept, possibly cut to the limit.

        `learns`: whether the cut row has anything to learn.
        """
        longest = max(map(len, texts))
        self._shortest = longest if self._shortest is None else min(self._shortest, longest)
        kept = longest <= self.limit or (self.cut and learns)
        self.report.kept += kept
        self.report.dropped += not kept
        if kept and longest > self.limit:
            self.report.cut.append(self.report.kept - 1)
        return kept

    def _check_left(self) -> None:
        report = self.report
        if not report.rows:
            raise DataError(f"{report.key}: expected at least one row, the dataset is empty")
        if report.empty == report.rows:
            raise DataError(f"{report.key}: expected answers with some text, found none in {report.rows} rows")
        if not report.kept:
            others = report.rows - report.left_out
            name, less = report.limit.partition("=")[0], "" if self.cut else ", or set data.overlong=truncate"
            raise DataError(
                f"{report.key}: expected rows within {report.limit}, found none: all {others} rows were dropped, "
                f"the shortest has {self._shortest} tokens. Raise {name}{less}"
            )
