"""Messages and tools of a row -> the form that chat templates read.

Roles are known ones, contents are texts, every tool call has its arguments as a mapping. Values that cannot be
converted are refused with their row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NoReturn

from aligner.errors import DataError
from aligner.foreign import parse_json

Messages = list[dict[str, Any]]
Text = str | Messages
Tools = list[dict[str, Any]]  # JSON schemas of the functions a conversation may call

ROLES = (
    *("system", "developer", "user", "assistant", "tool"),
    *("function", "ipython", "observation", "environment", "document", "context", "control"),  # of some templates
)
_MEANT = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}
# other keys are left to the template; a mistyped key is compared with these
KEYS = ("content", "tool_calls", "tool_call_id", "reasoning_content", "function_call", "function_calls")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def read_text(value: Any, name: str, where: str) -> Text:
    """Read the column `name`, a string or messages. Raises DataError."""
    return value if isinstance(value, str) else read_messages(value, name, where)


def read_messages(value: Any, name: str, where: str) -> Messages:
    """Read the messages of column `name`. A null in a message is an absent value. Raises DataError."""
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: expected `{name}` to be {'' if name == 'messages' else 'a string or '}a list of "
            f"{{role, content}} messages, found {str(value)[:80]!r} ({type(value).__name__}; data.columns)"
        )
    return [_message(message, name, f"{where}, {name}[{number}]", where) for number, message in enumerate(value)]


def check_learned(messages: Messages, name: str, where: str) -> None:
    """Raise DataError for messages without any of the assistant's: nothing would be learned."""
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "no message"
        raise DataError(f"{where}: expected a message of role assistant in `{name}`, to be learned, found {roles}")


def _message(message: Any, name: str, path: str, where: str) -> dict[str, Any]:
    kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
    if "function_call" in kept:  # OpenAI's predecessor of tool_calls
        kept.setdefault("tool_calls", [{"type": "function", "function": kept.pop("function_call")}])
    if "tool_calls" in kept:
        kept["tool_calls"] = _calls(kept["tool_calls"], f"{path}.tool_calls")
        if not kept["tool_calls"]:
            del kept["tool_calls"]
        else:
            kept.setdefault("content", "")
    if isinstance(kept.get("content"), list):
        kept["content"] = _joined(kept["content"], name, where)
    _check_keys(kept, path)
    if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content"), str):
        turns = f"data.format=sharegpt 'data.columns={{conversations: {name}}}' reads turns of from and value"
        raise DataError(
            f"{where}: expected messages of `{name}` with the strings `role` and `content`, "
            f"found {str(message)[:120]} ({turns if 'from' in kept and 'value' in kept else 'data.columns'})"
        )
    if kept["role"] not in ROLES:
        near = _MEANT.get(kept["role"].strip().lower()) or _nearest(kept["role"].strip().lower(), ROLES)
        _refuse(f"{path}.role", kept["role"], f"one of {', '.join(ROLES)}", f"Did you mean {near!r}?" if near else "")
    return kept


def _check_keys(message: Mapping[str, Any], path: str) -> None:
    """Raise DataError for a key that is nearly one that templates read, if the message lacks that one."""
    for key in message:
        near = None if key in KEYS else _nearest(key, KEYS)
        if near is not None and near not in message:
            raise DataError(f"{path}: found the key {key!r}, which no template reads. Did you mean {near!r}?")
    for key in THOUGHTS:
        if not isinstance(message.get(key, ""), str):
            _refuse(f"{path}.{key}", message[key], "a string")


@lru_cache(4096)
def _nearest(word: str, known: Sequence[str]) -> str | None:
    cutoff = 0.6 if known is ROLES else 0.85
    return next(iter(get_close_matches(word, known, n=1, cutoff=cutoff)), None)


def _calls(value: Any, path: str) -> list[dict[str, Any]]:
    """Read tool calls, also as JSON text, each {function: {name, arguments}} or {name, arguments}."""
    listed = parse_json(value, path, DataError, nan=True) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(listed, list):
        _refuse(path, value, "a list of calls, {function: {name, arguments}}, or its JSON text")
    return [_call(call, f"{path}[{number}]") for number, call in enumerate(listed)]


def _call(call: Any, path: str) -> dict[str, Any]:
    nested = isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    function = call["function"] if nested else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        _refuse(path, call, "a call, {function: {name, arguments}} or {name, arguments}")
    known = dict(function)
    written = known.pop("parameters", None) if "arguments" not in known else known["arguments"]
    known["arguments"] = _arguments(written, f"{path}, arguments of {function['name']}")
    return {**call, "function": known} if nested else known


def _arguments(value: Any, path: str) -> dict[str, Any]:
    """Read the arguments of a call, a mapping or its JSON text. None or a blank text means no arguments."""
    if isinstance(value, str) and value.strip():
        value = parse_json(value, path, DataError, nan=True)
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, Mapping):
        _refuse(path, value, "a JSON object, or its JSON text")
    _check_json(value, path)
    return dict(value)


def _check_json(value: Any, path: str) -> None:
    """Raise DataError for a value that a template could not write as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: expected values of JSON types ({error}): {str(value)[:80]}") from None


def _joined(parts: list[Any], name: str, where: str) -> str:
    """Return the text of content in OpenAI's parts, each {type: text, text: ...}."""
    for piece in parts:
        if not isinstance(piece, Mapping) or piece.get("type") != "text" or not isinstance(piece.get("text"), str):
            raise DataError(
                f"{where}: expected a message of `{name}` to have a text as content, or a list of parts "
                f"{{type: text, text: ...}}, found the part {str(piece)[:120]}: images, video and audio are not read "
                "(data.columns)"
            )
    return "".join(piece["text"] for piece in parts)


def read_tools(row: Mapping[str, Any], text: Text, where: str) -> Tools | None:
    """Read the column `tools` of a conversation: a list of JSON schemas; it or each of them may be JSON text.

    If the row is a plain text, `tools` is an ordinary column. Raises DataError.
    """
    value = row.get("tools")
    if isinstance(text, str) or value is None:
        return None
    listed = _parsed(value)
    listed = [_parsed(tool) for tool in listed] if isinstance(listed, list) else listed
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise DataError(
            f"{where}: expected the column `tools` to be a list of JSON schemas, or its JSON text, found "
            f"{str(value)[:80]!r} (data.columns)"
        )
    _check_json(listed, f"{where}, tools")
    return listed or None


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text; other values unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _refuse(path: str, value: Any, expected: str, hint: str = "") -> NoReturn:
    raise DataError(f"{path}={str(value)[:80]!r}: expected {expected}" + (f". {hint}" if hint else " (data.columns)"))
