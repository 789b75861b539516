"""Datasets of token ids, built once from typed rows. Flat numpy arrays hold the tokens: no list per row."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from aligner.config.sections.data import DataConfig
from aligner.data.chats import check_arguments, unread_tools
from aligner.data.formats import PreferenceRow, PromptRow, ScoredRow, SftRow, Text, TypedRows
from aligner.data.templates import encode_answers, encode_prompts, encode_sft, shipped_in_use
from aligner.data.tokenizer import stop_token_ids
from aligner.errors import DataError
from aligner.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IN_MEMORY = 1 << 28  # bytes of a flat array
CHUNK = 2048  # rows tokenized by one call: bounds the lists that exist at one time


class SftItem(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]
    documents: np.ndarray | None = None  # int64 [T] numbers of the documents in a row of several; None: it is one


class PreferenceItem(NamedTuple):
    chosen: np.ndarray  # int32 [Tc]
    rejected: np.ndarray  # int32 [Tr]
    margin: float  # 0 where the row has none

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.chosen), len(self.rejected)


class PairItem(NamedTuple):
    """Two answers to one prompt, each after it."""

    chosen: SftItem
    rejected: SftItem
    margin: float  # 0 where the row has none, as the rewards
    chosen_reward: float
    rejected_reward: float
    weight: float  # 1 where the row has none
    reference: tuple[np.ndarray, np.ndarray] | None = None  # float32 logprobs [T] of both, where they are stored

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.chosen.tokens), len(self.rejected.tokens)


class ScoredItem(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    scores: np.ndarray  # float32 [K]


@dataclass
class DataReport:
    """What became of the rows of a file. `truncated` rows are among the `kept`."""

    key: str
    limit: str
    rows: int = 0
    kept: int = 0
    dropped: int = 0
    truncated: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        text = f"{self.key}: {self.rows} rows, {self.kept} kept"
        if self.dropped or self.truncated:
            text += f", {self.dropped} dropped and {self.truncated} truncated by {self.limit}"
        return "; ".join([text, *self.notes])


class Ragged:
    """Rows of different lengths in one flat array; row i is a view of flat[offsets[i]:offsets[i + 1]]. Beyond IN_MEMORY
    bytes the array lies in a temporary file (TMPDIR), mapped into memory: what is not read needs none."""

    def __init__(self, dtype: type):
        self._dtype = np.dtype(dtype)
        self._new: list[np.ndarray] = []
        self._blocks: list[np.ndarray] = []  # rows, end to end
        self._file: IO[bytes] | None = None  # or there
        self._lengths: list[np.ndarray] = []

    def append(self, row: Sequence[int]) -> None:
        self._new.append(np.asarray(row, dtype=self._dtype))

    def pack(self) -> Ragged:
        """Move what was appended to the flat array. Raises DataError if there is no room for it."""
        if self._new:
            self._lengths.append(np.fromiter(map(len, self._new), np.int64, len(self._new)))
            self._blocks.append(np.concatenate(self._new))
            self._new = []
            self.__dict__.pop("flat", None), self.__dict__.pop("offsets", None)
        if self._file is not None or sum(block.nbytes for block in self._blocks) > IN_MEMORY:
            try:
                self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the rows)
                self._file.writelines(block.data for block in self._blocks)
                self._file.flush()
            except OSError as error:
                where = f"{tempfile.gettempdir()} (TMPDIR)"
                raise DataError(f"cannot keep the tokens of the data in {where}: {error.strerror}") from error
            self._blocks = []
        return self

    @cached_property
    def flat(self) -> np.ndarray:
        if self._file is not None:
            return np.memmap(self._file, self._dtype, mode="r")
        self._blocks = [np.concatenate([np.zeros(0, self._dtype), *self._blocks])]
        return self._blocks[0]

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [len(self) + 1]"""
        return np.concatenate([[0], *self._lengths]).cumsum().astype(np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


class SftDataset:
    """Rows longer than data.max_tokens are dropped, or lose their end (data.overlong).

    Raises DataError if no row is left, or as `templates.encode_sft`.
    """

    def __init__(
        self,
        rows: Sequence[SftRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        limit, cut = data.max_tokens, data.overlong == "truncate"
        self.report = _report(key, f"data.max_tokens={limit}", rows)
        self._tokens, self._mask = Ragged(np.int32), Ragged(np.uint8)
        shortest, fix = None, data.chat_template == "auto"
        for chunk in _chunks(rows):
            _note(self.report, tokenizer, chunk, [row.messages or row.prompt for row in chunk], data)
            name = shipped_in_use(tokenizer, chunk) if fix and data.loss_on != "all" else None
            if name is not None:
                self.report.note(
                    f"answers that the tokenizer's chat template does not keep as they are generated are learned by "
                    f"the shipped chat template {name} (data.chat_template)"
                )
            for tokens, mask in encode_sft(tokenizer, chunk, data.loss_on, data.template_arguments, fix):
                shortest = len(tokens) if shortest is None else min(shortest, len(tokens))
                # a row whose answer is cut off entirely has nothing to learn
                if _fits([tokens], limit, cut and any(mask[:limit]), self.report):
                    self._tokens.append(tokens[:limit])
                    self._mask.append(mask[:limit])
            self._tokens.pack()
            self._mask.pack()
        _check_left(self.report, shortest, cut)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> SftItem:
        return SftItem(self._tokens[index], self._mask[index])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per row."""
        return self._tokens.lengths


class PreferenceDataset:
    """A pair is dropped if one of its texts is longer than data.max_tokens; or both lose their ends, unless the pair
    then has no difference left."""

    def __init__(
        self,
        rows: Sequence[PreferenceRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        limit, cut = data.max_tokens, data.overlong == "truncate"
        stop = stop_token_ids(tokenizer)
        self.report = _report(key, f"data.max_tokens={limit}", rows)
        self._chosen, self._rejected = Ragged(np.int32), Ragged(np.int32)
        margins, shortest = [], None
        for chunk in _chunks(rows):
            _note(self.report, tokenizer, chunk, [row.chosen for row in chunk], data)
            prompts, where = [row.prompt for row in chunk], [row.where for row in chunk]
            answers = [*(row.chosen for row in chunk), *(row.rejected for row in chunk)]
            tools = [row.tools for row in chunk] * 2
            texts = encode_answers(  # a prompt twice, encoded once
                tokenizer, prompts * 2, answers, where * 2, stop, tools, data.template_arguments
            )
            for row, chosen, rejected in zip(chunk, texts, texts[len(chunk) :], strict=False):
                longest = max(len(chosen), len(rejected))
                shortest = longest if shortest is None else min(shortest, longest)
                if _fits([chosen, rejected], limit, cut and chosen[:limit] != rejected[:limit], self.report):
                    self._chosen.append(chosen[:limit])
                    self._rejected.append(rejected[:limit])
                    margins.append(row.margin or 0.0)
            self._chosen.pack()
            self._rejected.pack()
        self._margins = np.asarray(margins, dtype=np.float32)
        _check_left(self.report, shortest, cut)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> PreferenceItem:
        return PreferenceItem(self._chosen[index], self._rejected[index], float(self._margins[index]))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per pair, both texts together."""
        return self._chosen.lengths + self._rejected.lengths


class PairDataset:
    """Pairs whose answers a policy learns from, with loss masks as `SftDataset` has them. A pair is dropped if one of
    its texts is longer than data.max_tokens; or both lose their ends, unless an answer then has no token left, or the
    pair no difference. Equal answers stay: they have no gradient, and their share is a metric.

    Raises DataError for an answer without text, and where the two do not begin with the same prompt.
    """

    def __init__(
        self,
        rows: Sequence[PreferenceRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        limit, cut = data.max_tokens, data.overlong == "truncate"
        self.report = _report(key, f"data.max_tokens={limit}", rows)
        self._tokens, self._mask = Ragged(np.int32), Ragged(np.uint8)  # of pair i in rows 2i and 2i + 1
        numbers, shortest, equal, fix = [], None, 0, data.chat_template == "auto"
        for chunk in _chunks(rows):
            _note(self.report, tokenizer, chunk, [row.chosen for row in chunk], data)
            answers = [
                SftRow(prompt=row.prompt, completion=x, where=row.where, tools=row.tools)
                for row in chunk
                for x in _answers(row)
            ]
            texts = encode_sft(tokenizer, answers, arguments=data.template_arguments, fix=fix)
            for row, chosen, rejected in zip(chunk, texts[0::2], texts[1::2], strict=True):
                _check_prompt(row, chosen, rejected)
                longest = max(len(chosen[0]), len(rejected[0]))
                shortest = longest if shortest is None else min(shortest, longest)
                learns = (
                    any(chosen[1][:limit]) and any(rejected[1][:limit]) and chosen[0][:limit] != rejected[0][:limit]
                )
                if _fits([chosen[0], rejected[0]], limit, cut and learns, self.report):
                    for tokens, mask in (chosen, rejected):
                        self._tokens.append(tokens[:limit])
                        self._mask.append(mask[:limit])
                    equal += chosen[0] == rejected[0]
                    named = (row.numbers.get(name, 0.0) for name in ("chosen_reward", "rejected_reward"))
                    numbers.append((row.margin or 0.0, *named, row.numbers.get("weight", 1.0)))
            self._tokens.pack()
            self._mask.pack()
        self._numbers = np.asarray(numbers, dtype=np.float32).reshape(-1, 4)
        self.reference: np.ndarray | None = None  # float32 [self.tokens], where stage dpo stores it
        if equal:
            self.report.note(f"{equal} pairs have equal answers: they have no gradient")
        _check_left(self.report, shortest, cut)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> PairItem:
        chosen, rejected = (SftItem(self._tokens[i], self._mask[i]) for i in (2 * index, 2 * index + 1))
        numbers = map(float, self._numbers[index])
        if self.reference is None:
            return PairItem(chosen, rejected, *numbers)
        a, b, c = self.place(index)
        return PairItem(chosen, rejected, *numbers, (self.reference[a:b], self.reference[b:c]))

    @property
    def tokens(self) -> int:
        """Of all pairs."""
        return int(self._tokens.offsets[-1])

    def place(self, index: int) -> tuple[int, int, int]:
        """Where a pair's chosen answer begins among all tokens, its rejected one, and the next pair."""
        a, b, c = self._tokens.offsets[2 * index : 2 * index + 3]
        return int(a), int(b), int(c)

    def digest(self) -> bytes:
        """Of all tokens and what of them is learned."""
        found = hashlib.sha256(self._tokens.offsets.tobytes())
        for row in range(len(self._tokens)):
            found.update(self._tokens[row].tobytes() + self._mask[row].tobytes())
        return found.digest()

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per pair, both texts together."""
        return self._tokens.lengths.reshape(-1, 2).sum(1)


class ScoredDataset:
    """Texts with target scores, for a regression reward model; over-long texts as in SftDataset."""

    def __init__(
        self,
        rows: Sequence[ScoredRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        limit, cut = data.max_tokens, data.overlong == "truncate"
        stop = stop_token_ids(tokenizer)
        self.report = _report(key, f"data.max_tokens={limit}", rows)
        self._tokens = Ragged(np.int32)
        scores, shortest = [], None
        for chunk in _chunks(rows):
            _note(self.report, tokenizer, chunk, [row.completion for row in chunk], data)
            prompts, where = [row.prompt for row in chunk], [row.where for row in chunk]
            tools, answers = [row.tools for row in chunk], [row.completion for row in chunk]
            texts = encode_answers(tokenizer, prompts, answers, where, stop, tools, data.template_arguments)
            for row, tokens in zip(chunk, texts, strict=True):
                shortest = len(tokens) if shortest is None else min(shortest, len(tokens))
                if _fits([tokens], limit, cut, self.report):
                    self._tokens.append(tokens[:limit])
                    scores.append(row.scores)
            self._tokens.pack()
        self._scores = np.asarray(scores, dtype=np.float32)
        _check_left(self.report, shortest, cut)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> ScoredItem:
        return ScoredItem(self._tokens[index], self._scores[index])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per row."""
        return self._tokens.lengths


class PromptDataset:
    """Prompts to generate from. Longer ones than data.max_prompt_tokens are dropped, or keep their last tokens.

    `Prompt.id` is the row number in the file, whatever was dropped before it. A column that only other rows have is
    None.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        key: str = "data.train",
    ):
        limit, cut = data.max_prompt_tokens, data.overlong == "truncate"
        self.report = _report(key, f"data.max_prompt_tokens={limit}", rows)
        self._prompts: list[Prompt] = []
        self._where: list[str] = []
        shortest, columns = None, {}
        for first, chunk in zip(range(0, len(rows), CHUNK), _chunks(rows), strict=True):
            _note(self.report, tokenizer, chunk, [row.prompt for row in chunk], data)
            columns |= {name: None for row in chunk for name in row.fields}
            where, tools = [row.where for row in chunk], [row.tools for row in chunk]
            ids = encode_prompts(tokenizer, [row.prompt for row in chunk], where, tools, data.template_arguments)
            texts = tokenizer.batch_decode([tokens[-limit:] for tokens in ids], skip_special_tokens=False)
            for number, (row, tokens, text) in enumerate(zip(chunk, ids, texts, strict=True), start=first):
                if not tokens:
                    raise DataError(
                        f"{row.where}: expected a prompt of at least one token, found {row.prompt!r} ({key})"
                    )
                shortest = len(tokens) if shortest is None else min(shortest, len(tokens))
                if _fits([tokens], limit, cut, self.report):
                    messages = None if isinstance(row.prompt, str) else tuple(row.prompt)
                    self._prompts.append(Prompt(number, tuple(tokens[-limit:]), text, row.fields, messages))
                    self._where.append(row.where)
        self._prompts = [replace(prompt, fields={**columns, **prompt.fields}) for prompt in self._prompts]
        _check_left(self.report, shortest, cut)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def where(self, index: int) -> str:
        """`file, row n` of a prompt."""
        return self._where[index]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per prompt."""
        return np.asarray([len(prompt.tokens) for prompt in self._prompts], dtype=np.int64)


def _answers(row: PreferenceRow) -> Iterator[Text]:
    """Chosen and rejected; raises DataError for one that says nothing."""
    for name, answer in (("chosen", row.chosen), ("rejected", row.rejected)):
        turns = [] if isinstance(answer, str) else [m for m in answer if m["role"] == "assistant"]
        said = [answer] if isinstance(answer, str) else [m["content"] for m in turns]
        if not any(text.strip() for text in said) and not any("tool_calls" in m for m in turns):
            raise DataError(f"{row.where}: expected an answer with some text in `{name}`, found {answer!r:.120}")
        yield answer


def _check_prompt(row: PreferenceRow, chosen: tuple[list[int], list[int]], rejected: tuple[list[int], list[int]]):
    """(tokens, loss mask) of both answers: the same before the first token that is learned."""
    ends = [mask.index(1) for _, mask in (chosen, rejected)]
    if ends[0] != ends[1] or chosen[0][: ends[0]] != rejected[0][: ends[1]]:
        raise DataError(
            f"{row.where}: expected `chosen` and `rejected` to answer the same prompt, found other tokens before the "
            f"answers, of {ends[0]} and {ends[1]} tokens (a column `prompt`, or first messages that are the same)"
        )


def _chunks(rows: Sequence) -> Iterable[Sequence]:
    return (rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK))


def _report(key: str, limit: str, rows: Sequence) -> DataReport:
    report = DataReport(key, limit, rows=len(rows))
    if isinstance(rows, TypedRows) and rows.told:
        report.note(f"format {rows.told}, told from the columns (data.format)")
    return report


def _note(report: DataReport, tokenizer: PreTrainedTokenizerBase, rows: Sequence, texts: list[Text], data: DataConfig):
    """What to say of the rows' conversations; raises ConfigError for an argument that the chat template lacks."""
    if any(not isinstance(text, str) for text in texts):
        check_arguments(tokenizer, data.template_arguments)
        if unread_tools(tokenizer, [row.tools for row in rows]):
            report.note("the column `tools` has no effect: the chat template does not read it")


def _fits(texts: Sequence[Sequence[int]], limit: int, cut: bool, report: DataReport) -> bool:
    """Count the row in the report; True if it is kept (cut to the limit where it is longer)."""
    long = any(len(text) > limit for text in texts)
    kept = cut or not long
    report.kept += kept
    report.dropped += not kept
    report.truncated += kept and long
    return kept


def _check_left(report: DataReport, shortest: int | None, cut: bool) -> None:
    if not report.rows:
        raise DataError(f"{report.key}: expected at least one row, the dataset is empty")
    if not report.kept:
        name, less = report.limit.partition("=")[0], "" if cut else ", or set data.overlong=truncate"
        raise DataError(
            f"{report.key}: expected rows within {report.limit}, found none: all {report.rows} rows were dropped, the "
            f"shortest has {shortest} tokens. Raise {name}{less}"
        )
