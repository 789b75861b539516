"""Typed reading of JSON that others wrote, or an earlier run, so that damage is an error of one line.

A reader asks a `JsonObject` for values by name and kind. An error for an absent value, one of another kind or out of
range has the file, the position in it, the value and the expectation. Nothing in such a file is executed. Runs on
Python 3.7 too: the host's own Python, outside of containers, reads with it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from aligner.errors import AlignerError

MAX_BYTES = 256 << 20  # of a file that is read whole; the index of the largest models has some megabytes
MAX_DEPTH = 100  # deeper ones exceed the interpreter's recursion limit where they are copied or written again
REQUIRED: Any = object()  # the default of a value that must be there
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)

if TYPE_CHECKING:
    Error = type[AlignerError]


def parse_json(text: str | bytes, where: str, error: Error, *, line: int = 0, nan: bool = False) -> Any:
    """Parse JSON. `where` names the file; `line` is that of `text` in it, 0 for a whole file. `nan`: NaN and infinities
    may occur.

    Raises `error` also for duplicate keys, half surrogate pairs, and nesting deeper than MAX_DEPTH.
    """
    position = f"{where}:{line}" if line else where
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = (_ANY if nan else _FINITE).decode(text)
    except json.JSONDecodeError as cause:
        at = position if line else f"{where}:{cause.lineno}"
        raise error(f"{at}: not valid JSON ({_shown(cause)})") from None
    except RecursionError:
        raise error(f"{position}: expected JSON nested at most {MAX_DEPTH} deep") from None
    except ValueError as cause:  # not UTF-8, or of the hooks
        raise error(f"{position}: not valid JSON ({cause})") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise error(f"{position}: expected JSON nested at most {MAX_DEPTH} deep")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as cause:
            half = cause.object[cause.start]
            raise error(f"{position}: expected Unicode text, found {half!r}, one half of a surrogate pair") from None
    return value


def read_json(path: Path, error: Error, *, nan: bool = False) -> Any:
    """Return the value in a file. Raises `error` naming it."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise error(f"{path}: {size} bytes: expected a JSON file of at most {MAX_BYTES} bytes")
        data = path.read_bytes()
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from None
    return parse_json(data, str(path), error, nan=nan)


def read_record(path: Path, error: Error, *, nan: bool = False) -> JsonObject:
    """Return the JSON object in a file. Raises `error` naming it."""
    return record(read_json(path, error, nan=nan), str(path), error)


def record(value: Any, where: str, error: Error) -> JsonObject:
    """Return the value as a `JsonObject`. Raises `error` if it is no JSON object."""
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {_short(value)}")
    return JsonObject(value, where, error)


class JsonObject:
    """The fields of a JSON object. A null is an absent value. Methods raise `error` naming `where` and the field;
    those with a default return it where the value is absent."""

    def __init__(self, fields: dict[str, Any], where: str, error: Error, prefix: str = ""):
        self.fields, self.where, self.error, self.prefix = fields, where, error, prefix

    def __contains__(self, key: str) -> bool:
        return self.fields.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def refuse(self, key: str, expected: str) -> NoReturn:
        value = _short(self.fields.get(key))
        raise self.error(f"{self.where}: {self.prefix}{key}={value}: expected {expected}")

    def need(self, *keys: str) -> None:
        missing = [self.prefix + key for key in keys if key not in self]
        if missing:
            raise self.error(f"{self.where}: no value for {', '.join(missing)}")

    def integer(self, key: str, default: Any = REQUIRED, low: int = 0, high: int = 2**63 - 1) -> Any:
        value = self._value(key, default)
        if value is not default and not (_is_integer(value) and low <= value <= high):
            self.refuse(key, f"an integer {_bounds(low, high)}")
        return value

    def number(self, key: str, default: Any = REQUIRED, above: float = -math.inf) -> Any:
        """Return a finite float."""
        value = self._value(key, default)
        if value is default:
            return default
        if not is_number(value) or not value > above:
            self.refuse(key, "a finite number" + (f" > {above:g}" if above > -math.inf else ""))
        return float(value)

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        return self._typed(key, default, str, "a string")

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        return self._typed(key, default, bool, "true or false")

    def list(self, key: str, default: Any = REQUIRED) -> Any:
        return self._typed(key, default, list, "a list")

    def integers(self, key: str, default: Any = REQUIRED, low: int = 0) -> Any:
        value = self.list(key, default)
        if value is not default and not all(_is_integer(item) and item >= low for item in value):
            self.refuse(key, f"a list of integers >= {low}")
        return value

    def numbers(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.list(key, default)
        if value is not default and not all(is_number(item) for item in value):
            self.refuse(key, "a list of finite numbers")
        return value if value is default else [float(item) for item in value]

    def texts(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.list(key, default)
        if value is not default and not all(isinstance(item, str) for item in value):
            self.refuse(key, "a list of strings")
        return value

    def record(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the JSON object below `key`, as a JsonObject."""
        value = self._typed(key, default, dict, "a JSON object")
        return value if value is default else JsonObject(value, self.where, self.error, f"{self.prefix}{key}.")

    def text_map(self, key: str) -> dict[str, str]:
        value = self._typed(key, REQUIRED, dict, "a JSON object of strings")
        if not all(isinstance(item, str) for item in value.values()):
            self.refuse(key, "a JSON object of strings")
        return value

    def _typed(self, key: str, default: Any, kind: type, expected: str) -> Any:
        value = self._value(key, default)
        if value is not default and not isinstance(value, kind):
            self.refuse(key, expected)
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.fields.get(key)
        if value is None:
            if default is REQUIRED:
                self.need(key)
            return default
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether this is a finite JSON number: no boolean, no text, and none beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _bounds(low: int, high: int) -> str:
    return f">= {low}" if high == 2**63 - 1 else f"from {low} to {high}"


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown(cause: json.JSONDecodeError) -> str:
    return f"{cause.msg.removesuffix(' at')} at character {cause.colno}: {cause.doc[max(0, cause.pos - 20) :][:40]!r}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} comes twice")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a float")
    return value


# made once: `json.loads` with hooks makes one for each text, which is half the time of a line of a dataset
_ANY = json.JSONDecoder(object_pairs_hook=_unique)
_FINITE = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _depth(value: Any) -> int:
    """Return the nesting depth of lists and objects. Without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, (dict, list)):
            deepest = max(deepest, depth)
            inner = item.values() if isinstance(item, dict) else item
            waiting += [(x, depth + 1) for x in inner]
    return deepest
