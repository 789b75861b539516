"""Tool calls in what a model writes, by the formats of the families.

hermes       <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>, also several     Qwen, Hermes, ...
llama3       {"name": "add", "parameters": {"a": 1}}, perhaps behind <|python_tag|>; several after a semicolon
mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or add[ARGS]{"a": 1} behind each [TOOL_CALLS]
qwen3_coder  <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
                                                                     Qwen3-Coder, Qwen3.5, Nemotron 3
glm45        <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>         GLM-4.5, GLM-4.6
deepseek     <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>                        DeepSeek-V3.1
             <｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>  V3, R1
kimi_k2      <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
harmony      <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>      gpt-oss

The values of qwen3_coder and glm45 are plain text: `tool_values.py` reads them by the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.data.tool_values import types_of, value_of, value_text

Tools = Sequence[dict[str, Any]]
Found = tuple[str, "list[Call]"]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")
_V3 = re.compile(r"\s*\w+\s*<｜tool▁sep｜>\s*([^\n{]*?)\s*```json\s*")
_CALLS, _CALL, _CALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_KIMI_CALLS, _KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
_KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
# what a template that shows no call of its own may tell the model, the most particular first
MARKS = {
    "qwen3_coder": "<function=",
    "glm45": "<arg_key>",
    "deepseek": _CALL,
    "kimi_k2": _KIMI_CALL,
    "harmony": "<|channel|>commentary",
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3": '"parameters": ',
}
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


def read_calls(text: str, kind: str, tools: Tools = ()) -> Found:
    """(what the model says beside its calls, the calls), of an answer with its special tokens. No `kind`: no calls.
    `tools`: their schemas, which tell the types of values that are plain text."""
    return READERS[kind](text, tools) if kind else (text, [])


def format_of(text: str, name: str, arguments: dict[str, Any]) -> str:
    """The format in which a text has exactly this call, or ""."""
    as_texts = lambda values: {key: str(value) for key, value in (values or {}).items()}  # noqa: E731
    for kind in READERS:
        calls = read_calls(text, kind)[1]
        if [(call.name, as_texts(call.arguments)) for call in calls] == [(name, as_texts(arguments))]:
            return kind
    return ""


def spoken(text: str) -> str:
    """What an answer says to the user; of channels (gpt-oss) the final one."""
    return _harmony(text, ())[0] if "<|channel|>" in text else text


def written(kind: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model writes it."""
    text = json.dumps(arguments)
    values = [(key, value_text(kind, value)) for key, value in arguments.items()]
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values)
    return {
        "hermes": f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {text}}}\n</tool_call>',
        "llama3": f'{{"name": {json.dumps(name)}, "parameters": {text}}}',
        "mistral": f'[TOOL_CALLS][{{"name": {json.dumps(name)}, "arguments": {text}}}]',
        "qwen3_coder": f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "glm45": f"<tool_call>{name}\n{pairs}</tool_call>",
        "deepseek": f"{_CALLS}{_CALL}{name}<｜tool▁sep｜>{text}{_CALL_END}<｜tool▁calls▁end｜>",
        "kimi_k2": f"{_KIMI_CALLS}{_KIMI_CALL}functions.{name}:0{_KIMI_ARGUMENTS}{text}{_KIMI_END}"
        "<|tool_calls_section_end|>",
        "harmony": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}",
    }[kind]


def _hermes(text: str, tools: Tools) -> Found:
    return _HERMES.sub("", text).strip(), [_read(found) for found in _HERMES.findall(text)]


def _llama3(text: str, tools: Tools) -> Found:
    said, tag, calls = text.rpartition(PYTHON_TAG)
    calls = calls.strip()
    if not tag and not (calls.startswith("{") and '"name"' in calls):
        return text.strip(), []
    return said.strip(), [_read(part) for part in _values(calls)]


def _mistral(text: str, tools: Tools) -> Found:
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


def _qwen3_coder(text: str, tools: Tools) -> Found:
    """Also without <tool_call> around a function, as the models sometimes write."""
    if "<function=" not in text and "<tool_call>" not in text:
        return text.strip(), []
    beside, calls, end = [], [], 0
    while (start := _first(text, ("<tool_call>", "<function="), end)) < len(text):
        beside.append(text[end:start])
        opened = _past(text, _past(text, start, "<tool_call>"), "")
        if not text.startswith("<function=", opened):
            end = _first(text, ("</tool_call>",), opened)
            calls.append(Call(fault="a call is <function=NAME>, its parameters, </function> within <tool_call>"))
        else:
            name, inside = _upto(text, opened + len("<function="), ">")
            pairs, end = _pairs(text, inside, ("<parameter=", ">", "", "</parameter>"), ("</function>", "</tool_call>"))
            calls.append(_call(name, pairs, text[:end], tools, "qwen3_coder"))
            end = _past(text, end, "</function>")
        end = _past(text, end, "</tool_call>")
    return "".join([*beside, text[end:]]).strip(), calls


def _glm45(text: str, tools: Tools) -> Found:
    beside, calls, end = [], [], 0
    while (start := text.find("<tool_call>", end)) >= 0:
        beside.append(text[end:start])
        opened = start + len("<tool_call>")
        inside = _first(text, ("<arg_key>", "</tool_call>", "\n"), _past(text, opened, ""))
        pairs, end = _pairs(text, inside, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), ("</tool_call>",))
        calls.append(_call(text[opened:inside], pairs, text[:end], tools, "glm45"))
        end = _past(text, end, "</tool_call>")
    return "".join([*beside, text[end:]]).strip(), calls


def _deepseek(text: str, tools: Tools) -> Found:
    said, *parts = text.split(_CALL)
    found = []
    for part in parts:
        body = part.partition(_CALL_END)[0]
        if (header := _V3.match(body)) is not None:
            found.append(_named(header[1], body[header.end() :]))
        else:
            name, sep, arguments = body.partition("<｜tool▁sep｜>")
            found.append(_named(name if sep else "", arguments))
    return said.replace(_CALLS, "").strip(), found


def _kimi_k2(text: str, tools: Tools) -> Found:
    said, *parts = text.split(_KIMI_CALL)
    found = []
    for part in parts:
        own, sep, arguments = part.partition(_KIMI_END)[0].partition(_KIMI_ARGUMENTS)
        name = own.strip().removeprefix("functions.").partition(":")[0] if sep else ""
        found.append(_named(name, arguments))
    return said.replace(_KIMI_CALLS, "").strip(), found


def _harmony(text: str, tools: Tools) -> Found:
    """Beside calls stands what was thought; without any, what is said in the final channel."""
    thought, final, calls = [], [], []
    for part in re.split(r"<\|start\|>assistant|<\|end\|>|<\|return\|>|<\|call\|>", text):
        header, sep, body = part.partition("<|message|>")
        if not sep:
            final += [header] if header.strip() else []
        elif (to := _RECIPIENT.search(header)) is not None:
            calls.append(_named(to[1], body))
        else:
            (thought if "analysis" in header else final).append(body)
    return "\n".join(thought if calls else final).strip(), calls


def _pairs(
    text: str, place: int, marks: tuple[str, str, str, str], ends: tuple[str, ...]
) -> tuple[list[tuple[str, str]] | None, int]:
    """(key, value) pairs from `place` on, and where the first of `ends` stands behind them. `marks`: before a key,
    behind it, before its value, behind it; a value ends where a further pair or an end follows. None: something else
    stands between them."""
    before, behind, opens, closes = marks
    found: list[tuple[str, str]] = []
    while True:
        place = _past(text, place, "")
        if place == len(text) or text.startswith(ends, place):
            return found, place
        if not text.startswith(before, place):
            return None, _first(text, ends, place)
        key, place = _upto(text, place + len(before), behind)
        start = _past(text, place, opens) if opens else place
        end = start
        while (end := text.find(closes, end)) >= 0:
            place = _past(text, end + len(closes), "")
            if place == len(text) or text.startswith((before, *ends), place):
                break
            end += len(closes)
        if end < 0:
            return None, _first(text, ends, start)
        found.append((key, text[start:end]))


def _past(text: str, place: int, mark: str) -> int:
    """Behind white space and, if it follows, the mark; with a mark that does not follow, `place` itself."""
    at = place
    while at < len(text) and text[at].isspace():
        at += 1
    if not mark:
        return at
    return at + len(mark) if text.startswith(mark, at) else place


def _first(text: str, marks: tuple[str, ...], place: int) -> int:
    """Where the first of the marks stands, or the text's end."""
    return min((at for mark in marks if (at := text.find(mark, place)) >= 0), default=len(text))


def _upto(text: str, place: int, mark: str) -> tuple[str, int]:
    """What stands before the mark, and the place behind it."""
    end = _first(text, (mark,), place)
    return text[place:end], min(len(text), end + len(mark))


def _call(name: str, pairs: list[tuple[str, str]] | None, before: str, tools: Tools, kind: str) -> Call:
    name = name.strip()
    if not name or re.search(r"[<>\s]", name):
        return Call(fault="a call begins with the name of a function")
    if pairs is None:
        return Call(fault=f"the arguments of {name} are not written as {MARKS[kind]}...: each value has an end")
    types = types_of(name, tools)
    return _sound(name, {key.strip(): value_of(kind, value, types.get(key.strip())) for key, value in pairs})


def _named(name: str, arguments: str) -> Call:
    """Of arguments in JSON, behind which nothing but white space and the end of a block of code stands."""
    try:
        text = arguments.strip()
        value, end = json.JSONDecoder().raw_decode(text) if text else ({}, 0)
        if (rest := text[end:].strip()) not in ("", "```"):
            return Call(fault=f"this call is not valid JSON (behind its end stands {rest[:20]!r})")
    except (ValueError, RecursionError) as cause:
        return Call(fault=f"this call is not valid JSON ({cause})")
    if not name.strip():
        return Call(fault="a call begins with the name of a function")
    return _sound(name.strip(), value)


def _sound(name: str, arguments: Any) -> Call:
    if not isinstance(arguments, dict):
        return Call(fault=f"the arguments of {name} are no JSON object")
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as cause:
        return Call(fault=f"this call is not valid JSON ({cause})")
    return Call(name, arguments)


def _values(text: str) -> Iterator[str]:
    """JSON values with semicolons between them; what cannot be read is one."""
    place = 0
    while place < len(text):
        try:
            end = json.JSONDecoder().raw_decode(text, place)[1]
        except (ValueError, RecursionError):
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
    except (ValueError, RecursionError) as cause:
        return Call(fault=f"this call is not valid JSON ({cause})")
    return _sound(value["name"], arguments)


READERS: dict[str, Callable[[str, Tools], Found]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "deepseek": _deepseek,
    "kimi_k2": _kimi_k2,
    "harmony": _harmony,
}
