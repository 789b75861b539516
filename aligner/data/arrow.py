"""Rows of Arrow tables, as JSON would have them.

A column of structs gives every row the fields of all rows, null where a row has none. So null fields of structs are
removed, at any depth. Nulls that Arrow never adds stay: those in lists, in maps, in JSON text, and of whole columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aligner.errors import DataError
from aligner.foreign import parse_json

if TYPE_CHECKING:
    import pyarrow

Restore = Callable[[Any], Any]


def table_rows(table: pyarrow.Table, where: str) -> list[dict[str, Any]]:
    """Return the rows of a table. Raises DataError, naming `where`, for invalid JSON in a column of JSON."""
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        restore, values = _restorer(column.type, f"{where}, column {name}"), column.to_pylist()
        columns.append(values if restore is None else [_unless_null(restore, value) for value in values])
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * table.num_rows


def _restorer(kind: pyarrow.DataType, where: str) -> Restore | None:
    """Return a function that converts a value of this type to JSON; None if no conversion is needed."""
    from pyarrow import types

    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return partial(_struct, {field.name: _restorer(field.type, where) for field in fields})
    if types.is_map(kind):
        return partial(_map, _restorer(kind.item_type, where))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _restorer(kind.value_type, where)
        return None if inner is None else partial(_list, inner)
    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: parse_json(text, where, DataError, nan=True)
    return None


def _unless_null(restore: Restore | None, value: Any) -> Any:
    return value if restore is None or value is None else restore(value)


def _struct(fields: dict[str, Restore | None], value: dict[str, Any]) -> dict[str, Any]:
    return {name: _unless_null(fields[name], inner) for name, inner in value.items() if inner is not None}


def _map(restore: Restore | None, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {key: _unless_null(restore, value) for key, value in pairs}


def _list(restore: Restore, values: list[Any]) -> list[Any]:
    return [_unless_null(restore, value) for value in values]
