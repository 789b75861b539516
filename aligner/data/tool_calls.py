"""Tool calls in what a model writes, by the formats of the families.

hermes   <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>, also several        Qwen, Hermes, ...
llama3   {"name": "add", "parameters": {"a": 1}}, perhaps behind <|python_tag|>; several after a semicolon
mistral  [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or add[ARGS]{"a": 1} behind each [TOOL_CALLS]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")
MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": '"parameters": '}
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """`fault`: why it cannot be read; it then has no name."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    fault: str = ""

    def message(self, number: int) -> dict[str, Any]:
        """As chat templates have it. Mistral's want ids of nine letters or digits."""
        function = {"name": self.name, "arguments": self.arguments or {}}
        return {"id": f"call{number:05d}", "type": "function", "function": function}


def read_calls(text: str, kind: str) -> tuple[str, list[Call]]:
    """(what the model says beside its calls, the calls), of an answer with its special tokens. No `kind`: no calls."""
    return READERS[kind](text) if kind else (text, [])


def written(kind: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model writes it."""
    if kind == "llama3":
        return json.dumps({"name": name, "parameters": arguments})
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>" if kind == "hermes" else f"[TOOL_CALLS][{text}]"


def _hermes(text: str) -> tuple[str, list[Call]]:
    return _HERMES.sub("", text).strip(), [_read(found) for found in _HERMES.findall(text)]


def _llama3(text: str) -> tuple[str, list[Call]]:
    said, tag, calls = text.rpartition(PYTHON_TAG)
    calls = calls.strip()
    if not tag and not (calls.startswith("{") and '"name"' in calls):
        return text.strip(), []
    return said.strip(), [_read(part) for part in _values(calls)]


def _mistral(text: str) -> tuple[str, list[Call]]:
    said, *parts = text.split("[TOOL_CALLS]")
    found = []
    for part in parts:
        if (name := _MISTRAL.match(part)) is not None:
            found.append(_read(json.dumps({"name": name[1]})[:-1] + f', "arguments": {part[name.end() :]}}}'))
            continue
        try:
            listed = json.loads(part)
        except ValueError:
            listed = [part]
        found += [_read(each) for each in (listed if isinstance(listed, list) else [listed])]
    return said.strip(), found


def _values(text: str) -> Iterator[str]:
    """JSON values with semicolons between them; what cannot be read is one."""
    place = 0
    while place < len(text):
        try:
            end = json.JSONDecoder().raw_decode(text, place)[1]
        except ValueError:
            end = len(text)
        yield text[place:end]
        place = end + len(text[end:]) - len(text[end:].lstrip("; \n"))


def _read(value: Any) -> Call:
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return Call(fault='a call is a JSON object with "name"')
        arguments = value.get("arguments", value.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        json.dumps([value["name"], arguments], ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as cause:
        return Call(fault=f"this call is not valid JSON ({cause})")
    if not isinstance(arguments, dict):
        return Call(fault=f"the arguments of {value['name']} are no JSON object")
    return Call(value["name"], arguments)


READERS: dict[str, Callable[[str], tuple[str, list[Call]]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}
