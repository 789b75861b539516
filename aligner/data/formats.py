"""Rows of a file -> typed rows of a stage. The conventional columns are `messages`; `prompt`, `completion`; these and
`label`; `prompt`, `chosen`, `rejected`, `margin`; and `prompt` with any other fields. A text is a string, or a list of
{role, content} messages, whose `tools` are another column. Columns are renamed and built first (`columns.py`); rows of
two common formats are converted (`alpaca_sharegpt.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from aligner.config.sections.data import DataConfig
from aligner.config.sections.distill import RIGHT_ANSWER
from aligner.data.alpaca_sharegpt import converted, recognised
from aligner.data.columns import columns_of, filled, lookup
from aligner.data.messages import Messages, Text, Tools, check_learned, read_messages, read_text, read_tools
from aligner.data.pairs import prompt_and_answers, shared_prompt
from aligner.errors import DataError
from aligner.user_code import is_path, load

TeacherOf = Callable[[Mapping[str, Any], str], int | None]  # row, where -> number of its teacher; None: only one

NEEDS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "unpaired": ("prompt", "completion", "label"),
    "preference": ("chosen", "rejected"),
    "prompt": ("prompt",),
    "steps": ("prompt", "completions", "labels"),
    "text": ("text",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction",),
}
CONVERTED = ("sharegpt", "alpaca")
TEACHER_PROMPT = "teacher_prompt"  # a field of prompts, for teachers
MEDIA = ("image", "video", "audio")  # columns of files, also in the plural; a text shows one by <image>


@dataclass(frozen=True)
class SftRow:
    """A whole conversation in `messages`, or `prompt` and `completion`: both strings or both messages."""

    messages: Messages | None = None
    prompt: Text = ""
    completion: Text = ""
    where: str = ""
    tools: Tools | None = None
    teacher_index: int | None = None  # number of its teacher, if there are several

    @property
    def texts(self) -> tuple[Text, ...]:
        return (self.prompt, self.completion) if self.messages is None else (self.messages,)


@dataclass(frozen=True)
class PreferenceRow:
    prompt: Text  # "" or [] if the texts share none
    chosen: Text
    rejected: Text
    margin: float | None = None
    where: str = ""
    tools: Tools | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # of the columns that the stage needs


@dataclass(frozen=True)
class UnpairedRow:
    """Answers that are desirable or not: one, or the two of a pair."""

    prompt: Text
    answers: tuple[tuple[str, Text, bool], ...]  # column, answer, label
    where: str = ""
    tools: Tools | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # all columns


@dataclass(frozen=True)
class ScoredRow:
    """A row for a regression reward model: one target per attribute."""

    prompt: Text
    completion: Text
    scores: tuple[float, ...]
    where: str = ""
    tools: Tools | None = None


@dataclass(frozen=True)
class StepsRow:
    """A row for a process reward model: an answer in steps, each with the probability that it is right."""

    prompt: Text
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    where: str = ""
    tools: Tools | None = None


@dataclass(frozen=True)
class TextRow:
    """A document, for continued pre-training."""

    text: str
    where: str = ""


@dataclass(frozen=True)
class PromptRow:
    prompt: Text
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    tools: Tools | None = None


class TypedRows[T](Sequence[T]):
    """Typed rows of a stage, made on access: the file may be larger than memory.

    The first row decides the format. Raises DataError for columns or values that do not fit.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        data: DataConfig,
        usable: tuple[str, ...],
        make: Callable[[str, str, dict[str, Any]], T],
    ):
        """Detect the format.

        `make(format, where, row)` makes a typed row from one with renamed and built columns in a `usable` format. Other
        formats are converted to the first of these.
        """
        if not len(rows):
            raise DataError(f"data.train={data.train!r}: expected at least one row, the dataset is empty")
        self._rows, self._data, self._usable, self._make = rows, data, usable, make
        self._where = getattr(rows, "where", lambda index: f"row {index + 1}")
        self._convert = load(data.format, "data.format", "function", DataError) if is_path(data.format) else None
        self.format = _detect(columns_of(self._own(0, rows[0]), data, self._where(0)), data, usable, self._where(0))
        detected = data.format == "auto" and self.format in CONVERTED
        notes = [f"format {self.format}, detected from the columns (data.format)"] if detected else []
        self.notes = [note for note in (getattr(rows, "note", ""), *notes) if note]  # for the report
        self[0]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index):
        numbers = range(len(self))[index]
        if isinstance(index, slice):
            return [self._typed(i, row) for i, row in zip(numbers, self._rows[index], strict=True)]
        return self._typed(numbers, self._rows[numbers])

    def __iter__(self) -> Iterator[T]:
        return (self._typed(i, row) for i, row in enumerate(self._rows))

    def _own(self, index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a user's function makes of the row, without one the row itself."""
        if self._convert is None:
            return row
        expected = f"{self._where(index)}: data.format={self._data.format!r}: expected a function of a row that returns"
        try:
            made = self._convert(dict(row))
        except Exception as cause:
            raise DataError(f"{expected} its columns: it raised {type(cause).__name__}: {cause}") from cause
        if not isinstance(made, Mapping):
            raise DataError(f"{expected} a mapping of columns, not {_short(made)}")
        return made

    def _typed(self, index: int, original: Mapping[str, Any]) -> T:
        where, kind, original = self._where(index), self.format, self._own(index, original)
        row = columns_of(original, self._data, where)
        for name, value in original.items():
            mark = str(name).removesuffix("s")
            if value and mark in MEDIA and (f"<{mark}>" in str({**original, name: None}) or _is_data(value)):
                expected = "rows of text: images, video and audio are not read"
                raise DataError(f"{where}: the column `{name}` has {mark} data: expected {expected}. Remove such rows")
        if kind in CONVERTED:
            kind = "preference" if "preference" in self._usable and row.get("chosen") is not None else self._usable[0]
            row = converted(self.format, row, kind, where)
        # a stage that generates uses only the prompt of a preference file
        needs = ("prompt",) if self._usable[0] == "prompt" and kind != "messages" else NEEDS[kind]
        missing = [name for name in needs if row.get(name) is None]
        if missing:
            raise DataError(_wrong_columns(where, row, (kind,), missing))
        return self._make(kind, where, row)


def no_teacher(row: Mapping[str, Any], where: str) -> None:
    pass


def sft_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig, teacher: TeacherOf = no_teacher) -> TypedRows[SftRow]:
    """Return rows for supervised fine-tuning."""
    return TypedRows(rows, data, ("messages", "prompt_completion"), partial(_sft_row, teacher, data.loss_on))


def _sft_row(teacher_of: TeacherOf, loss_on: str, kind: str, where: str, row: dict[str, Any]) -> SftRow:
    teacher = teacher_of(row, where)
    if kind == "messages":
        messages = read_messages(row["messages"], "messages", where)
        if loss_on == "assistant":
            check_learned(messages, "messages", where)
        return SftRow(messages=messages, where=where, tools=read_tools(row, messages, where), teacher_index=teacher)
    prompt, (completion,) = prompt_and_answers(row, ("completion",), where)
    return SftRow(None, prompt, completion, where, read_tools(row, prompt, where), teacher)


def text_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig) -> TypedRows[TextRow]:
    """Return documents from the column `text`."""
    return TypedRows(rows, data, ("text",), _text_row)


def _text_row(_: str, where: str, row: dict[str, Any]) -> TextRow:
    if not isinstance(row["text"], str):
        raise DataError(f"{where}: text={str(row['text'])[:80]!r}: expected a string (data.columns)")
    return TextRow(row["text"], where)


def preference_rows(
    rows: Sequence[Mapping[str, Any]],
    data: DataConfig,
    margin: bool = False,
    numbers: Mapping[str, str] | None = None,
    whole: bool = False,
) -> TypedRows[PreferenceRow]:
    """Return pairs of answers.

    Without a `prompt` column, the common beginning of both texts is the prompt. `whole`: strings stay whole, for a
    stage that learns no tokens.

    `margin`: each row must have a number in the column `margin`. `numbers`: required columns of numbers, each with the
    config key that requires it.
    """
    return TypedRows(rows, data, ("preference",), partial(_preference_row, margin, numbers or {}, whole))


def _preference_row(
    margin: bool, numbers: Mapping[str, str], whole: bool, _: str, where: str, row: dict[str, Any]
) -> PreferenceRow:
    value = None
    if margin or row.get("margin") is not None:
        value = _number(row, "margin", where)
    if row.get("prompt") is not None:
        prompt, (chosen, rejected) = prompt_and_answers(row, ("chosen", "rejected"), where)
    else:
        prompt, chosen, rejected = shared_prompt(row, where)
        if whole and isinstance(chosen, str):
            prompt, chosen, rejected = "", row["chosen"], row["rejected"]
    columns = {name: _number(row, name, where, key) for name, key in numbers.items()}
    return PreferenceRow(prompt, chosen, rejected, value, where, read_tools(row, chosen, where), columns)


def unpaired_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig) -> TypedRows[UnpairedRow]:
    """Return answers with a boolean in the column `label`, or pairs, whose chosen answers are desirable."""
    return TypedRows(rows, data, ("unpaired", "preference"), _unpaired_row)


def _unpaired_row(kind: str, where: str, row: dict[str, Any]) -> UnpairedRow:
    if kind == "preference":
        pair = _preference_row(False, {}, False, kind, where, row)
        answers = (("chosen", pair.chosen, True), ("rejected", pair.rejected, False))
        return UnpairedRow(pair.prompt, answers, where, pair.tools, row)
    label = row["label"]
    if not isinstance(label, bool):
        raise DataError(f"{where}: label={label!r:.80}: expected true or false (data.columns)")
    prompt, (completion,) = prompt_and_answers(row, ("completion",), where)
    return UnpairedRow(prompt, (("completion", completion, label),), where, read_tools(row, prompt, where), row)


def scored_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig, attributes: Sequence[str]) -> TypedRows[ScoredRow]:
    """Return rows for a regression reward model: prompt, completion and a number in each column of `attributes`."""
    return TypedRows(rows, data, ("prompt_completion",), partial(_scored_row, attributes))


def _scored_row(attributes: Sequence[str], _: str, where: str, row: dict[str, Any]) -> ScoredRow:
    prompt, (completion,) = prompt_and_answers(row, ("completion",), where)
    scores = tuple(_number(row, name, where, "algorithm.reward_loss.attributes") for name in attributes)
    return ScoredRow(prompt, completion, scores, where, read_tools(row, prompt, where))


def step_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig) -> TypedRows[StepsRow]:
    """Return rows for a process reward model: prompt, `completions` (a list of steps) and as many `labels`."""
    return TypedRows(rows, data, ("steps",), _steps_row)


def _steps_row(_: str, where: str, row: dict[str, Any]) -> StepsRow:
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(f"{where}: expected a list of texts, the steps, in `completions`, found {_short(steps)}")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise DataError(f"{where}: expected a list of {len(steps)} in `labels`, one for a step, found {_short(labels)}")
    for number, label in enumerate(labels, 1):
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            expected = "true, false, or a number from 0 to 1"
            raise DataError(f"{where}: label {number}: expected {expected} in `labels`, found {label!r}")
    prompt = read_text(row["prompt"], "prompt", where)
    return StepsRow(prompt, tuple(steps), tuple(map(float, labels)), where, read_tools(row, prompt, where))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def prompt_rows(
    rows: Sequence[Mapping[str, Any]],
    data: DataConfig,
    teacher: TeacherOf = no_teacher,
    tools: Tools | None = None,
    teacher_prompt: str = "",
) -> TypedRows[PromptRow]:
    """Return rows to generate from; all other columns stay in `fields`.

    A last assistant turn of `messages` is removed. With `tools`, which the model can call, a prompt that is a text
    becomes a user's message. A format string `teacher_prompt` adds the field TEACHER_PROMPT: the same prompt with its
    last message built anew.
    """
    usable = ("prompt", "prompt_completion", "preference", "messages")
    return TypedRows(rows, data, usable, partial(_prompt_row, teacher, tools, teacher_prompt))


def _prompt_row(
    teacher_of: TeacherOf, tools: Tools | None, teacher_prompt: str, kind: str, where: str, row: dict[str, Any]
) -> PromptRow:
    teacher_of(row, where)
    if kind == "messages":
        prompt = read_messages(row["messages"], "messages", where)
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
    else:
        prompt = read_text(row.get("prompt"), "prompt", where)
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] == "assistant"):
        raise DataError(f"{where}: expected `prompt` to end with a user turn (data.columns)")
    fields = {name: value for name, value in row.items() if name != "prompt"}
    if teacher_prompt:
        fields[TEACHER_PROMPT] = _built_anew(prompt, teacher_prompt, fields, where)
    own = read_tools(row, prompt, where)
    if tools is None:
        return PromptRow(prompt, fields, where, own)
    if own:
        raise DataError(f"{where}: expected no column `tools`: environment.tools or environment.path sets the tools")
    return PromptRow([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, fields, where, tools)


def _built_anew(prompt: Text, template: str, fields: Mapping[str, Any], where: str) -> Text:
    """Return the prompt with its text, or that of its last message, made of the columns and of itself, `{prompt}`.
    RIGHT_ANSWER stays in it, to be replaced."""
    last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    own = {"prompt": last} | ({RIGHT_ANSWER[1:-1]: RIGHT_ANSWER} if RIGHT_ANSWER in template else {})
    return with_last(prompt, filled(template, f"algorithm.distill.{TEACHER_PROMPT}", {**fields, **own}, where))


def with_last(prompt: Text, text: str) -> Text:
    """Return the prompt with this text, or with this as the text of its last message."""
    return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]


def _detect(row: Mapping[str, Any], data: DataConfig, usable: tuple[str, ...], where: str) -> str:
    if data.format != "auto" and not is_path(data.format):
        if data.format not in usable + CONVERTED:
            expected = f"{', '.join(usable)} or {' or '.join(CONVERTED)}"
            raise DataError(f"{where}: data.format={data.format!r}: expected {expected} for this stage")
        return data.format
    for target in usable:
        theirs = recognised(row, target)
        if theirs is not None:
            return theirs
    for kind in usable:
        if all(row.get(name) is not None for name in NEEDS[kind]):
            return kind
    raise DataError(_wrong_columns(where, row, usable))


def _is_data(value: Any) -> bool:
    """Return whether a column has files' bytes, or paths as columns of Hugging Face's type Image have them."""
    values = value if isinstance(value, list) else [value]
    return any(
        isinstance(one, bytes) or (isinstance(one, Mapping) and {"bytes", "path"} & one.keys()) for one in values
    )


def _wrong_columns(where: str, row: Mapping[str, Any], usable: tuple[str, ...], missing: Sequence[str] = ()) -> str:
    columns = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in row.items()) or "none"
    expected = " or ".join("{" + ", ".join(NEEDS[kind]) + "}" for kind in usable)
    lack = f"; missing: {', '.join(missing)}" if missing else ""
    return (
        f"{where}: expected the columns {expected}, found {columns}{lack}. "
        "Rename with data.columns={ours: theirs}, build them with data.prompt_template, or set data.format"
    )


def _number(row: Mapping[str, Any], name: str, where: str, key: str = "algorithm.reward_loss.margin") -> float:
    try:
        value = lookup(row, name)
    except LookupError:
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{where}: expected a finite number in the column `{name}` ({key}, data.columns), found {value!r}; "
            f"columns: {', '.join(map(str, row))}"
        )
    return float(value)
