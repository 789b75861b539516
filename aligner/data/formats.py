"""Rows of a file -> typed rows of a stage. The conventional columns are `messages`; `prompt`, `completion`; these and
`label`; `prompt`, `chosen`, `rejected`, `margin`; and `prompt` with any other fields. A text is a string, or a list of
{role, content} messages, whose `tools` are a further column. `data.columns` renames, `data.prompt_template` and
`data.completion_template` build columns; rows of two widespread formats are converted (`alpaca_sharegpt.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from aligner.config.sections.data import DataConfig
from aligner.data.alpaca_sharegpt import converted, recognised
from aligner.errors import DataError

Messages = list[dict[str, Any]]
Text = str | Messages
ToldBy = Callable[[Mapping[str, Any], str], int | None]  # row, where -> number of its teacher, None without several
Tools = list[dict[str, Any]]  # JSON schemas of the functions a conversation may call

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


@dataclass(frozen=True)
class SftRow:
    """A whole conversation in `messages`, or `prompt` and `completion`: both strings or both messages."""

    messages: Messages | None = None
    prompt: Text = ""
    completion: Text = ""
    where: str = ""
    tools: Tools | None = None
    told_by: int | None = None  # the number of its teacher, where there are several


@dataclass(frozen=True)
class PreferenceRow:
    prompt: Text  # "" or [] where the texts share none
    chosen: Text
    rejected: Text
    margin: float | None = None
    where: str = ""
    tools: Tools | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # of the columns that the stage asks for


@dataclass(frozen=True)
class UnpairedRow:
    """Answers that are desirable or not: one, or the two of a pair."""

    prompt: Text
    answers: tuple[tuple[str, Text, bool], ...]  # column, answer, label
    where: str = ""
    tools: Tools | None = None


@dataclass(frozen=True)
class ScoredRow:
    """For a regression reward model: one target per attribute."""

    prompt: Text
    completion: Text
    scores: tuple[float, ...]
    where: str = ""
    tools: Tools | None = None


@dataclass(frozen=True)
class StepsRow:
    """For a process reward model: an answer in steps, each with the probability that it is right."""

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
    """Typed rows of a stage, each made when it is asked for: the file may be larger than memory. The first row decides
    the format. Raises DataError for columns or values that do not fit."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        data: DataConfig,
        usable: tuple[str, ...],
        make: Callable[[str, str, dict[str, Any]], T],
    ):
        """`make(format, where, row)`, of a row with renamed and built columns in one of the `usable` formats, of which
        the first is what others are converted to."""
        if not len(rows):
            raise DataError(f"data.train={data.train!r}: expected at least one row, the dataset is empty")
        self._rows, self._data, self._usable, self._make = rows, data, usable, make
        self._where = getattr(rows, "where", lambda index: f"row {index + 1}")
        self.format = _detect(_build(rows[0], data, self._where(0)), data, usable, self._where(0))
        self.told = self.format if data.format == "auto" and self.format in CONVERTED else ""  # to be said
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

    def _typed(self, index: int, original: Mapping[str, Any]) -> T:
        where, kind = self._where(index), self.format
        row = _build(original, self._data, where)
        if kind in CONVERTED:
            kind = "preference" if "preference" in self._usable and row.get("chosen") is not None else self._usable[0]
            row = converted(self.format, row, kind, where)
        # of a preference file only the prompt is of use to a stage that generates
        needs = ("prompt",) if self._usable[0] == "prompt" and kind != "messages" else NEEDS[kind]
        missing = [name for name in needs if row.get(name) is None]
        if missing:
            raise DataError(_wrong_columns(where, row, (kind,), missing))
        return self._make(kind, where, row)


def by_none(row: Mapping[str, Any], where: str) -> None:
    pass


def sft_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig, told_by: ToldBy = by_none) -> TypedRows[SftRow]:
    """Rows for supervised fine-tuning."""
    return TypedRows(rows, data, ("messages", "prompt_completion"), partial(_sft_row, told_by))


def _sft_row(told_by: ToldBy, kind: str, where: str, row: dict[str, Any]) -> SftRow:
    teacher = told_by(row, where)
    if kind == "messages":
        messages = _messages(row["messages"], "messages", where)
        return SftRow(messages=messages, where=where, tools=_tools(row, messages, where), told_by=teacher)
    prompt, completion = _pair(row, "completion", where)
    return SftRow(None, prompt, completion, where, _tools(row, prompt, where), teacher)


def text_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig) -> TypedRows[TextRow]:
    """Documents, of the column `text`."""
    return TypedRows(rows, data, ("text",), _text_row)


def _text_row(_: str, where: str, row: dict[str, Any]) -> TextRow:
    if not isinstance(row["text"], str):
        raise DataError(f"{where}: text={str(row['text'])[:80]!r}: expected a string (data.columns)")
    return TextRow(row["text"], where)


def preference_rows(
    rows: Sequence[Mapping[str, Any]], data: DataConfig, margin: bool = False, numbers: Mapping[str, str] | None = None
) -> TypedRows[PreferenceRow]:
    """Pairs of answers. Without a `prompt` column, whole conversations share their first messages.

    `margin`: each row must have a number in the column `margin`. `numbers`: likewise in these columns, each with the
    config key that asks for it.
    """
    return TypedRows(rows, data, ("preference",), partial(_preference_row, margin, numbers or {}))


def _preference_row(margin: bool, numbers: Mapping[str, str], _: str, where: str, row: dict[str, Any]) -> PreferenceRow:
    value = None
    if margin or row.get("margin") is not None:
        value = _number(row, "margin", where)
    if row.get("prompt") is not None:
        prompt, chosen = _pair(row, "chosen", where)
        prompt, rejected = _pair(row, "rejected", where)
    else:
        prompt, chosen, rejected = _shared_prompt(row, where)
    asked = {name: _number(row, name, where, key) for name, key in numbers.items()}
    return PreferenceRow(prompt, chosen, rejected, value, where, _tools(row, chosen, where), asked)


def unpaired_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig) -> TypedRows[UnpairedRow]:
    """Answers, each with a boolean in the column `label`; or pairs, whose chosen answers are desirable."""
    return TypedRows(rows, data, ("unpaired", "preference"), _unpaired_row)


def _unpaired_row(kind: str, where: str, row: dict[str, Any]) -> UnpairedRow:
    if kind == "preference":
        pair = _preference_row(False, {}, kind, where, row)
        answers = (("chosen", pair.chosen, True), ("rejected", pair.rejected, False))
        return UnpairedRow(pair.prompt, answers, where, pair.tools)
    label = row["label"]
    if not isinstance(label, bool):
        raise DataError(f"{where}: label={label!r:.80}: expected true or false (data.columns)")
    prompt, completion = _pair(row, "completion", where)
    return UnpairedRow(prompt, (("completion", completion, label),), where, _tools(row, prompt, where))


def scored_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig, attributes: Sequence[str]) -> TypedRows[ScoredRow]:
    """Rows for a regression reward model: prompt, completion and a number in each column of `attributes`."""
    return TypedRows(rows, data, ("prompt_completion",), partial(_scored_row, attributes))


def _scored_row(attributes: Sequence[str], _: str, where: str, row: dict[str, Any]) -> ScoredRow:
    prompt, completion = _pair(row, "completion", where)
    scores = tuple(_number(row, name, where, "algorithm.reward_loss.attributes") for name in attributes)
    return ScoredRow(prompt, completion, scores, where, _tools(row, prompt, where))


def step_rows(rows: Sequence[Mapping[str, Any]], data: DataConfig) -> TypedRows[StepsRow]:
    """Rows for a process reward model: prompt, `completions` (a list of steps) and as many `labels`."""
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
    prompt = _text(row["prompt"], "prompt", where)
    return StepsRow(prompt, tuple(steps), tuple(map(float, labels)), where, _tools(row, prompt, where))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def prompt_rows(
    rows: Sequence[Mapping[str, Any]], data: DataConfig, told_by: ToldBy = by_none, tools: Tools | None = None
) -> TypedRows[PromptRow]:
    """Rows to generate from; all other columns stay in `fields`. Of `messages`, a last assistant turn is cut off. With
    `tools`, which the model may really call, a prompt that is a text is the user's."""
    usable = ("prompt", "prompt_completion", "preference", "messages")
    return TypedRows(rows, data, usable, partial(_prompt_row, told_by, tools))


def _prompt_row(told_by: ToldBy, tools: Tools | None, kind: str, where: str, row: dict[str, Any]) -> PromptRow:
    told_by(row, where)
    if kind == "messages":
        prompt = _messages(row["messages"], "messages", where)
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
    else:
        prompt = _text(row.get("prompt"), "prompt", where)
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] == "assistant"):
        raise DataError(f"{where}: expected `prompt` to end with a user turn (data.columns)")
    fields = {name: value for name, value in row.items() if name != "prompt"}
    own = _tools(row, prompt, where)
    if tools is None:
        return PromptRow(prompt, fields, where, own)
    if own:
        raise DataError(f"{where}: expected no column `tools`: those of environment.tools and environment.path count")
    return PromptRow([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, fields, where, tools)


def _build(original: Mapping[str, Any], data: DataConfig, where: str) -> dict[str, Any]:
    row = dict(original)
    for ours, theirs in data.columns.items():
        if theirs not in original:
            raise DataError(
                f"{where}: data.columns.{ours}={theirs!r}: expected one of the columns {', '.join(map(str, original))}"
            )
        row[ours] = original[theirs]
    built = {}
    for name in ("prompt", "completion"):
        template = getattr(data, f"{name}_template")
        if template:
            try:
                built[name] = template.format(**row)
            except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
                raise DataError(
                    f"{where}: data.{name}_template={template!r}: expected a format string over the columns "
                    f"{', '.join(map(str, row))} ({type(error).__name__}: {error})"
                ) from error
    return row | built


def _detect(row: Mapping[str, Any], data: DataConfig, usable: tuple[str, ...], where: str) -> str:
    if data.format != "auto":
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


def _wrong_columns(where: str, row: Mapping[str, Any], usable: tuple[str, ...], missing: Sequence[str] = ()) -> str:
    found = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in row.items()) or "none"
    expected = " or ".join("{" + ", ".join(NEEDS[kind]) + "}" for kind in usable)
    lack = f"; missing: {', '.join(missing)}" if missing else ""
    return (
        f"{where}: expected the columns {expected}, found {found}{lack}. "
        "Rename with data.columns={ours: theirs}, build them with data.prompt_template, or set data.format"
    )


def _pair(row: Mapping[str, Any], answer: str, where: str) -> tuple[Text, Text]:
    """(prompt, answer), both strings or both messages; a plain answer to a conversation is an assistant turn."""
    prompt, text = _text(row["prompt"], "prompt", where), _text(row[answer], answer, where)
    if isinstance(prompt, list) and isinstance(text, str):
        text = [{"role": "assistant", "content": text}]
    if isinstance(prompt, str) and isinstance(text, list):
        raise DataError(f"{where}: expected `prompt` to be a list of messages because `{answer}` is (data.columns)")
    return prompt, text


def _shared_prompt(row: Mapping[str, Any], where: str) -> tuple[Text, Text, Text]:
    chosen, rejected = _text(row["chosen"], "chosen", where), _text(row["rejected"], "rejected", where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: expected `chosen` and `rejected` to be both strings or both messages (data.columns)")
    if isinstance(chosen, str):
        return "", chosen, rejected
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    return chosen[:same], chosen[same:], rejected[same:]


def _text(value: Any, name: str, where: str) -> Text:
    return value if isinstance(value, str) else _messages(value, name, where)


def _messages(value: Any, name: str, where: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: expected `{name}` to be {'' if name == 'messages' else 'a string or '}a list of "
            f"{{role, content}} messages, found {str(value)[:80]!r} ({type(value).__name__}; data.columns)"
        )
    found = []
    for message in value:
        # Parquet gives every message the union of all keys, null where it had none
        kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
        if "tool_calls" in kept:
            kept.setdefault("content", "")
        if isinstance(kept.get("content"), list):
            kept["content"] = _joined(kept["content"], name, where)
        if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content"), str):
            raise DataError(
                f"{where}: expected messages of `{name}` with the strings `role` and `content`, "
                f"found {str(message)[:120]} (data.columns)"
            )
        found.append(kept)
    return found


def _joined(parts: list[Any], name: str, where: str) -> str:
    """The text of a content in OpenAI's parts, {type: text, text: ...} each."""
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{where}: expected a message of `{name}` to have a text as content, or a list of parts "
                f"{{type: text, text: ...}}, found the part {str(part)[:120]} (data.columns)"
            )
    return "".join(part["text"] for part in parts)


def _tools(row: Mapping[str, Any], text: Text, where: str) -> Tools | None:
    """The column `tools` of a conversation: a list of JSON schemas, or its JSON text. Beside a plain text it is a
    column like others."""
    value = row.get("tools")
    if isinstance(text, str) or value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = row["tools"]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"{where}: expected the column `tools` to be a list of JSON schemas, or its JSON text, found "
            f"{str(value)[:80]!r} (data.columns)"
        )
    return value or None


def _number(row: Mapping[str, Any], name: str, where: str, key: str = "algorithm.reward_loss.margin") -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{where}: expected a finite number in the column `{name}` ({key}, data.columns), found {value!r}; "
            f"columns: {', '.join(map(str, row))}"
        )
    return float(value)
