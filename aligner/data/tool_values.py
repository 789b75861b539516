"""Values of a call that are written as plain text; the tool's schema defines their types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schemas of a function's arguments, by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return dict(properties) if isinstance(properties, Mapping) else {}
    return {}


def value_text(kind: str, value: Any) -> str:
    """Write a value as templates do: a text unchanged, numbers and structures as JSON; qwen3_coder uses Python's
    words."""
    if isinstance(value, str):
        return value
    if kind == "qwen3_coder" and not isinstance(value, dict | list):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def value_of(kind: str, text: str, schema: Any) -> Any:
    """Return the value of a text by its schema; a text for an unknown type.

    A text that matches none of its types stays a text, which the called function refuses.
    """
    if kind == "qwen3_coder":  # each value has its own lines
        text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if not types:
        return text
    word = text.strip()
    value = _WORDS.get(word.lower(), text) if word.lower() in _WORDS else _parsed(word)
    if value is None and ("null" in types or (isinstance(schema, Mapping) and schema.get("nullable"))):
        return None
    return value if any(_is(value, kind) for kind in types - {"string"}) else text


def _types(schema: Any) -> set[str]:
    """Return the names of JSON types that a schema allows."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type", ())
    names = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(name) or ():
            names |= _types(one)
    if not names and isinstance(schema.get("enum"), list):
        names = {_NAMES[type(value)] for value in schema["enum"] if type(value) in _NAMES}
    if not names and "properties" in schema:
        names = {"object"}
    return names


_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is(value: Any, kind: str) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return {"boolean": bool, "array": list, "object": dict}.get(kind) is type(value)
