"""Columns of a row by the names that stages know: data.columns renames, data.prompt_template and
data.completion_template build. A nested column has a dotted path: `reward_model.ground_truth`, `choices.0.text`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from aligner.config.sections.data import DataConfig
from aligner.errors import DataError

Row = Mapping[str, Any]
_COMMAND = re.compile(r"\\[A-Za-z]{2,}\s*\{([^{}]+)\}")  # of LaTeX, with a name in its braces
_WRITTEN = re.compile(r"\{\{\s*([^{}\s]+)\s*\}\}")  # Jinja's form of a column; here it is the text `{name}`
BRACES = r"Double the braces of the text itself: \boxed{{}}"


def columns_of(original: Row, data: DataConfig, where: str) -> dict[str, Any]:
    """Return the row, with the columns that the config renames and builds. Raises DataError."""
    row = dict(original)
    for ours, theirs in data.columns.items():
        try:
            row[ours] = lookup(original, theirs)
        except LookupError as error:
            columns = ", ".join(map(str, original))
            nested = f" ({error.args[0]})" if "." in theirs else ""
            raise DataError(
                f"{where}: data.columns.{ours}={theirs!r}: expected one of the columns {columns}, or a dotted path to "
                f"a nested one{nested}"
            ) from None
    templates = {name: getattr(data, f"{name}_template") for name in ("prompt", "completion")}
    return row | {name: filled(text, f"data.{name}_template", row, where) for name, text in templates.items() if text}


def lookup(row: Row, path: str) -> Any:
    """Return the column of this name or, without one, the value at this dotted path. Raises LookupError."""
    if path in row:
        return row[path]
    value: Any = row
    parent = ""
    for name in path.split("."):
        value = _inner(value, name, parent)
        parent = f"{parent}.{name}" if parent else name
    return value


def _inner(value: Any, name: str, done: str) -> Any:
    if isinstance(value, Mapping) and name in value:
        return value[name]
    if isinstance(value, Sequence) and not isinstance(value, str) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    if isinstance(value, Mapping):
        raise LookupError(f"`{done}` has {', '.join(map(str, value)) or 'nothing'}" if done else f"no column `{name}`")
    size = f" of {len(value)}" if isinstance(value, list) else ""
    raise LookupError(f"`{done}` is a {type(value).__name__}{size}, without `{name}`")


class _Columns(Formatter):
    """Python's format strings whose fields name columns, also nested ones: `{a.b}` and `{a[b]}` are the same."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        if field_name.isdecimal():  # also `{}`
            raise LookupError("braces without a column's name")
        path = field_name if field_name in kwargs else re.sub(r"\[([^\]]*)\]", r".\1", field_name)
        value = lookup(kwargs, path)
        if value is None:
            raise ValueError(f"`{path}` is null in this row")
        return value, field_name


def filled(template: str, key: str, row: Row, where: str) -> str:
    """Return the format string with the row's columns. Raises DataError, naming its key."""
    for command in _COMMAND.finditer(template):
        if command[1] in row:
            text = command[0].replace("{", "{{").replace("}", "}}")
            column = command[0].replace("{", "{{{").replace("}", "}}}")
            raise DataError(
                f"{where}: {key}={template!r}: expected {text} for {command[0]} as a text, found braces "
                f"that the column `{command[1]}` would fill. To insert the column: {column}"
            )
    try:
        written = _WRITTEN.search(template)
        if written and written[1] in row and not any(field for _, field, *_ in Formatter().parse(template)):
            raise DataError(
                f"{where}: {key}={template!r}: expected a column, {{{written[1]}}}, found doubled "
                f"braces only: every row would be {template.format()!r}"
            )
        return _Columns().vformat(template, (), row)
    except (LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"{where}: {key}={template!r}: expected a format string over the columns "
            f"{', '.join(map(str, row))} ({error}). {BRACES}"
        ) from error
