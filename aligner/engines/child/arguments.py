"""Options of a user, `engine.*.args`, checked against the fields of the installed package's own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from enum import EnumType
from typing import Any, get_args

from aligner.errors import ConfigError


def checked_arguments(key: str, values: Mapping[str, Any], kind: type, version: str) -> dict[str, Any]:
    """Return the values as the types of the fields of `kind`, a dataclass or a pydantic model. Raises ConfigError of
    `key`."""
    known = getattr(kind, "model_fields", None) or kind.__dataclass_fields__
    for name, value in values.items():
        if name not in known:
            nearest = " or ".join(f"`{one}`" for one in get_close_matches(name, known))
            hint = f"Did you mean {nearest}?" if nearest else ""
            raise ConfigError(f"{key}.{name}", value, f"an option that {kind.__name__} of {version} has", hint)
    return {name: _typed(f"{key}.{name}", value, known[name], version) for name, value in values.items()}


def _typed(key: str, value: Any, field: Any, version: str) -> Any:
    from pydantic import TypeAdapter, ValidationError  # both packages have it

    hint = getattr(field, "annotation", None) or field.type
    if isinstance(hint, str):  # names of the package's own
        return value
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, EnumType) and isinstance(value, str) and value in kind.__members__:
            return kind[value]
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        expected = "; ".join(one["msg"] for one in error.errors())
        raise ConfigError(key, value, f"what {version} takes: {expected}") from error
