r"""Tool calls in a model's text, in the formats of the families.

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
gemma4       <|tool_call>call:add{a:1}<tool_call|>, one behind the other                            Gemma 4
lfm2         <|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>                               LFM2, LFM2.5

The values of qwen3_coder and glm45 are plain text: `tool_values.py` reads them by the tool's schema. `value_reader.py`
reads those of gemma4 and lfm2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aligner.data.tool_values import types_of, value_of, value_text
from aligner.data.value_reader import GEMMA_QUOTE, ValueReader, gemma_text, python_text

Tools = Sequence[dict[str, Any]]
Found = tuple[str, "list[Call]"]

_KEYS = {"name", "arguments", "parameters", "id", "type"}  # of a call in JSON
_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")
_V3 = re.compile(r"\s*\w+\s*<｜tool▁sep｜>\s*([^\n{]*?)\s*```json\s*")
_ENDS = "</tool_call>", "<tool_call>"  # of a call: its own, or the next one begins
_CALLS, _CALL, _CALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_KIMI_CALLS, _KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
_KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_GEMMA_CALL, _GEMMA_END = "<|tool_call>", "<tool_call|>"
_LFM_CALLS, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
# texts by which a template that shows no call may describe the format, the most specific first
MARKS = {
    "qwen3_coder": "<function=",
    "glm45": "<arg_key>",
    "deepseek": _CALL,
    "kimi_k2": _KIMI_CALL,
    "harmony": "<|channel|>commentary",
    "gemma4": _GEMMA_CALL,
    "lfm2": _LFM_CALLS,
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3": '"parameters": ',
}
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """A call. `fault`: why it cannot be read; then it has no name."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    fault: str = ""

    def message(self, number: int) -> dict[str, Any]:
        """Return it as chat templates read it. Mistral's need ids of nine letters or digits."""
        function = {"name": self.name, "arguments": self.arguments or {}}
        return {"id": f"call{number:05d}", "type": "function", "function": function}


def read_calls(text: str, kind: str, tools: Tools = ()) -> Found:
    """Return (the text beside the calls, the calls) of an answer with its special tokens.

    No `kind`: no calls. `tools`: their schemas, which define the types of values that are plain text.
    """
    return READERS[kind](text, tools) if kind else (text, [])


def format_of(text: str, name: str, arguments: dict[str, Any]) -> str:
    """Return the format in which a text has exactly this call, or ""."""
    as_texts = lambda values: {key: str(value) for key, value in (values or {}).items()}  # noqa: E731
    for kind in READERS:
        calls = read_calls(text, kind)[1]
        if [(call.name, as_texts(call.arguments)) for call in calls] == [(name, as_texts(arguments))]:
            return kind
    return ""


def spoken(text: str) -> str:
    """Return an answer's text for the user; with channels (gpt-oss) the final one."""
    return _harmony(text, ())[0] if "<|channel|>" in text else text


def written(kind: str, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as a model writes it."""
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
        "gemma4": f"{_GEMMA_CALL}call:{name}{gemma_text(arguments)}{_GEMMA_END}",
        "lfm2": f"{_LFM_CALLS}[{name}({', '.join(f'{key}={python_text(each)}' for key, each in arguments.items())})]"
        f"{_LFM_END}",
    }[kind]


def _hermes(text: str, tools: Tools) -> Found:
    beside, bodies = _bodies(text, "<tool_call>", _ENDS)
    return beside.strip(), [_read(body) for body in bodies]


def _llama3(text: str, tools: Tools) -> Found:
    beside, tag, calls = text.rpartition(PYTHON_TAG)
    calls = calls.strip()
    if not tag and not (calls.startswith("{") and '"name"' in calls):
        return text.strip(), []
    return beside.strip(), [_read(value) for value in _values(calls)]


def _mistral(text: str, tools: Tools) -> Found:
    beside, *bodies = text.split("[TOOL_CALLS]")
    calls = []
    for body in bodies:
        if (name := _MISTRAL.match(body)) is not None:
            calls.append(_read(json.dumps({"name": name[1]})[:-1] + f', "arguments": {body[name.end() :]}}}'))
            continue
        try:
            listed = json.loads(body)
        except ValueError:
            listed = [body]
        calls += [_read(each) for each in (listed if isinstance(listed, list) else [listed])]
    return beside.strip(), calls


def _qwen3_coder(text: str, tools: Tools) -> Found:
    """Read calls, also without <tool_call> around a function, as the models sometimes write."""
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
            pairs, end = _pairs(text, inside, ("<parameter=", ">", "", "</parameter>"), ("</function>", *_ENDS))
            calls.append(_call(name, pairs, text[:end], tools, "qwen3_coder"))
            end = _past(text, end, "</function>")
        end = _past(text, end, "</tool_call>")
    return "".join([*beside, text[end:]]).strip(), calls


def _glm45(text: str, tools: Tools) -> Found:
    beside, calls, end = [], [], 0
    while (start := text.find("<tool_call>", end)) >= 0:
        beside.append(text[end:start])
        opened = start + len("<tool_call>")
        inside = _first(text, ("<arg_key>", *_ENDS, "\n"), _past(text, opened, ""))
        pairs, end = _pairs(text, inside, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), _ENDS)
        calls.append(_call(text[opened:inside], pairs, text[:end], tools, "glm45"))
        end = _past(text, end, "</tool_call>")
    return "".join([*beside, text[end:]]).strip(), calls


def _deepseek(text: str, tools: Tools) -> Found:
    calls = []
    for block in _bodies(text, _CALL, (_CALL_END, _CALL))[1]:
        if (header := _V3.match(block)) is not None:
            calls.append(_named(header[1], block[header.end() :]))
        else:
            name, sep, arguments = block.partition("<｜tool▁sep｜>")
            calls.append(_named(name if sep else "", arguments))
    return text.partition(_CALL)[0].replace(_CALLS, "").strip(), calls


def _kimi_k2(text: str, tools: Tools) -> Found:
    calls = []
    for body in _bodies(text, _KIMI_CALL, (_KIMI_END, _KIMI_CALL))[1]:
        own, sep, arguments = body.partition(_KIMI_ARGUMENTS)
        name = own.strip().removeprefix("functions.").partition(":")[0] if sep else ""
        calls.append(_named(name, arguments))
    return text.partition(_KIMI_CALL)[0].replace(_KIMI_CALLS, "").strip(), calls


def _harmony(text: str, tools: Tools) -> Found:
    """Read channels: with calls, the text beside them is the thoughts; else it is the final channel."""
    thought, final, calls = [], [], []
    for message in re.split(r"<\|start\|>assistant|<\|end\|>|<\|return\|>|<\|call\|>", text):
        header, sep, content = message.partition("<|message|>")
        if not sep:
            final += [header] if header.strip() else []
        elif (to := _RECIPIENT.search(header)) is not None:
            calls.append(_named(to[1], content))
        else:
            (thought if "analysis" in header else final).append(content)
    return "\n".join(thought if calls else final).strip(), calls


def _gemma4(text: str, tools: Tools) -> Found:
    def read(reader: ValueReader) -> list[Call]:
        reader.expect("call:")
        name = reader.word()
        reader.expect("{")
        return [_sound(name, reader.pairs(":", "}"))]

    return _notated(text, (_GEMMA_END, _GEMMA_CALL), ((GEMMA_QUOTE, '"'), False), read)


def _lfm2(text: str, tools: Tools) -> Found:
    def read(reader: ValueReader) -> list[Call]:
        calls: list[Call] = []
        reader.expect("[")
        while not calls or reader.passes(","):
            name = reader.word()
            reader.expect("(")
            calls.append(_sound(name, reader.pairs("=", ")")))
        reader.expect("]")
        return calls

    return _notated(text, (_LFM_END, _LFM_CALLS), (("'", '"'), True), read)


def _notated(
    text: str,
    ends: tuple[str, str],
    notation: tuple[tuple[str, ...], bool],
    read: Callable[[ValueReader], list[Call]],
) -> Found:
    """Read calls in a notation of their own. `ends`: of a call, or the next one begins."""
    beside, calls, end = [], list[Call](), 0
    while (start := text.find(ends[1], end)) >= 0:
        beside.append(text[end:start])
        reader = ValueReader(text, start + len(ends[1]), *notation)
        try:
            made = read(reader)
            if not (reader.passes(ends[0]) or reader.ends() or text.startswith(ends[1], _past(text, reader.at, ""))):
                raise ValueError(f"behind its end stands {text[reader.at : reader.at + 20]!r}")
            end = reader.at
        except (ValueError, RecursionError) as cause:
            made = [Call(fault=f"this call is not valid ({cause})")]
            end = _past(text, _first(text, ends, start + len(ends[1])), ends[0])
        calls += made
    return "".join([*beside, text[end:]]).strip(), calls


def _bodies(text: str, opens: str, ends: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return (the text beside calls, the texts of calls), each up to the first of `ends` behind its JSON."""
    beside, bodies, end = [], [], 0
    while (start := text.find(opens, end)) >= 0:
        beside.append(text[end:start])
        start = behind = start + len(opens)
        if (brace := text.find("{", start, _first(text, ends, start))) >= 0:
            with suppress(ValueError, RecursionError):
                behind = json.JSONDecoder().raw_decode(text, brace)[1]
        end = _first(text, ends, behind)
        bodies.append(text[start:end])
        end += len(ends[0]) if text.startswith(ends[0], end) else 0
    return "".join([*beside, text[end:]]), bodies


def _pairs(
    text: str, position: int, marks: tuple[str, str, str, str], ends: tuple[str, ...]
) -> tuple[list[tuple[str, str]] | None, int]:
    """Read (key, value) pairs from `position` on; also return the position of the first of `ends` behind them.

    `marks`: before a key, behind it, before its value, behind it. A value ends before another pair or an end. Returns
    None for pairs if a mark is missing: other text stands between them, or a value would contain the next one.
    """
    before, behind, opens, closes = marks
    pairs: list[tuple[str, str]] = []
    while True:
        position = _past(text, position, "")
        if position == len(text) or text.startswith(ends, position):
            return pairs if pairs or position < len(text) else None, position  # a name alone may be a part of one
        if not text.startswith(before, position):
            return None, _first(text, ends, position)
        own = position + len(before)
        key, position = _upto(text, own, behind)
        end = start = _past(text, position, opens) if opens else position
        if "<" in key or "\n" in key or (opens and start == position):
            return None, _first(text, ends, own)
        while (end := text.find(closes, end)) >= 0:
            position = _past(text, end + len(closes), "")
            if position == len(text) or text.startswith((before, *ends), position):
                break
            end += len(closes)
        if end < 0 or before in text[start:end] or (opens and opens in text[start:end]):
            return None, _first(text, ends, start)
        pairs.append((key, text[start:end]))


def _past(text: str, position: int, mark: str) -> int:
    """Return the position behind white space and the mark; `position` itself if the mark does not follow."""
    at = position
    while at < len(text) and text[at].isspace():
        at += 1
    if not mark:
        return at
    return at + len(mark) if text.startswith(mark, at) else position


def _first(text: str, marks: tuple[str, ...], start: int) -> int:
    """Return the position of the first of the marks, or the text's end."""
    return min((at for mark in marks if (at := text.find(mark, start)) >= 0), default=len(text))


def _upto(text: str, start: int, mark: str) -> tuple[str, int]:
    """Return the text before the mark, and the position behind it."""
    end = _first(text, (mark,), start)
    return text[start:end], min(len(text), end + len(mark))


def _call(name: str, pairs: list[tuple[str, str]] | None, before: str, tools: Tools, kind: str) -> Call:
    name = name.strip()
    if not name or re.search(r"[<>\s]", name):
        return Call(fault="a call begins with the name of a function")
    if pairs is None:
        return Call(fault=f"the arguments of {name} are not written as {MARKS[kind]}...: each value has an end")
    if len({key.strip() for key, _ in pairs}) < len(pairs):
        return Call(fault=f"an argument of {name} is written twice")
    types = types_of(name, tools)
    return _sound(name, {key.strip(): value_of(kind, value, types.get(key.strip())) for key, value in pairs})


def _named(name: str, arguments: str) -> Call:
    """Read JSON arguments; only white space and the end of a code block may follow them."""
    try:
        text = arguments.strip()
        value, end = json.JSONDecoder().raw_decode(text)
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
        json.dumps([name, arguments], ensure_ascii=False).encode()  # half a surrogate pair is not a text
    except (ValueError, RecursionError) as cause:
        return Call(fault=f"this call is not valid JSON ({cause})")
    return Call(name, arguments)


def _values(text: str) -> Iterator[str]:
    """Yield JSON values separated by semicolons; an unreadable rest is one value."""
    position = 0
    while position < len(text):
        try:
            end = json.JSONDecoder().raw_decode(text, position)[1]
        except (ValueError, RecursionError):
            end = len(text)
        yield text[position:end]
        position = end + len(text[end:]) - len(text[end:].lstrip("; \n"))


def _read(value: Any) -> Call:
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return Call(fault='a call is a JSON object with "name"')
        if others := sorted(value.keys() - _KEYS):
            return Call(fault=f"a call has a name and arguments, found the key {others[0]!r}")
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
    "gemma4": _gemma4,
    "lfm2": _lfm2,
}
