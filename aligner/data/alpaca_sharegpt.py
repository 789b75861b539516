"""Rows of two common formats -> our columns.

alpaca: {instruction, input?, output, system?, history?: [[question, answer], ...]}.
sharegpt: {conversations: [{from, value}, ...], system?, tools?}; turns of the user's side (human, observation) and of
the model's (gpt, function_call) alternate. Turns of {role, content} are messages already. With `chosen` and
`rejected` both are preferences; `kto_tag` is our `label`. The columns as LLaMA-Factory reads them (its data/README.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from aligner.data.messages import read_messages
from aligner.errors import DataError

Row = Mapping[str, Any]
Turns = list[dict[str, Any]]
ROLES = {
    "human": "user",
    "user": "user",
    "observation": "tool",
    "tool": "tool",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
}
ASKING, ANSWERING = ("human", "observation"), ("gpt", "function_call")  # as errors name the sides
ANSWERED = ("messages", "prompt_completion", "unpaired")  # formats that hold the model's answer in one text
ANSWERS = {"preference": ("chosen", "rejected"), "prompt": ()}  # a stage's columns with answers; default: `output`


def recognised(row: Row, target: str) -> str | None:
    """Return `sharegpt`, `alpaca`, or None for a row without these columns. `target`: the format that the stage
    needs."""
    if row.get("messages") is not None or row.get("prompt") is not None:
        return None
    if row.get("conversations") is not None:
        return "sharegpt"
    answers = all(isinstance(row.get(name), str) for name in ANSWERS.get(target, ("output",)))
    return "alpaca" if isinstance(row.get("instruction"), str) and answers else None


def converted(kind: str, row: Row, target: str, where: str) -> dict[str, Any]:
    """Return the row with the columns of format `target` added. Raises DataError for turns that do not fit."""
    columns = dict(row)
    if columns.get("kto_tag") is not None:
        columns.setdefault("label", columns["kto_tag"])
    if kind == "alpaca":
        turns, answer = _instruction(row, where), lambda name: _string(row, name, where)
    else:
        turns, answer = _conversation(row, where), lambda name: _answer(row, name, where)
        columns["tools"] = _wrapped(row.get("tools"))
    if kind == "alpaca" and target in ANSWERED:
        turns.append({"role": "assistant", "content": _string(row, "output", where)})
    answered = turns[-1]["role"] == "assistant"
    if (target == "preference" and answered) or (target in ANSWERED and not answered):
        wanted = "turn of the user, which `chosen` and `rejected` answer" if answered else "answer of the model"
        raise DataError(f"{where}: expected `conversations` to end with a{'n' * (not answered)} {wanted}")
    if target == "messages":
        return columns | {"messages": turns}
    if target == "preference":
        return columns | {"prompt": turns, "chosen": answer("chosen"), "rejected": answer("rejected")}
    if target == "prompt":
        return columns | {"prompt": turns[:-1] if answered else turns}
    return columns | {"prompt": turns[:-1], "completion": turns[-1:]}


def _instruction(row: Row, where: str) -> Turns:
    """Return the turns up to the question. Answers of `history` are learned like the last one."""
    turns, history = _system(row, where), row.get("history")
    if history is not None and not isinstance(history, list):
        _refuse(where, "history", history, "a list of [question, answer] pairs of strings")
    for number, pair in enumerate(history or ()):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            _refuse(where, f"history[{number}]", pair, "a [question, answer] pair of strings")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = _string(row, "instruction", where)
    if row.get("input") not in (None, ""):
        question += "\n" + _string(row, "input", where)
    return [*turns, {"role": "user", "content": question}]


def _conversation(row: Row, where: str) -> Turns:
    listed = row.get("conversations")
    if not isinstance(listed, list) or not listed:
        _refuse(where, "conversations", listed, "a list of at least one {from, value}")
    turns = _system(row, where)
    if isinstance(listed[0], Mapping) and listed[0].get("role") is not None and listed[0].get("from") is None:
        messages = read_messages(listed, "conversations", where)
        own = messages[:1] if messages[0]["role"] == "system" else []
        return [*_one_system(turns, own, row, where), *messages[len(own) :]]
    if isinstance(listed[0], Mapping) and listed[0].get("from") == "system":
        first = {"role": "system", "content": _string(listed[0], "value", f"{where}, conversations[0]")}
        turns, listed = _one_system(turns, [first], row, where), listed[1:]
    skipped = len(row["conversations"]) - len(listed)
    if not listed:
        raise DataError(f"{where}: expected `conversations` with turns, found nothing but the system message")
    for number, turn in enumerate(listed):
        turns.append(_turn(turn, number % 2 == 1, f"{where}, conversations[{number + skipped}]"))
    return turns


def _turn(turn: Any, answers: bool, where: str) -> dict[str, Any]:
    """Return the message of a turn. It must be the model's if `answers`, else one that the model answers."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str):
        raise DataError(f"{where}: expected {{from, value}}, found {str(turn)[:80]!r}")
    name = turn["from"]
    expected = " or ".join(ANSWERING if answers else ASKING)
    if name not in ROLES or (ROLES[name] == "assistant") != answers:
        why = "sides alternate" if name in ROLES else f"known roles: system, {', '.join(ROLES)}"
        _refuse(where, "from", name, f"{expected} here ({why})")
    value = _string(turn, "value", where)
    if name != "function_call":
        return {"role": ROLES[name], "content": value}
    try:
        calls = json.loads(value)
    except ValueError as error:
        raise DataError(f"{where}: value={value[:80]!r}: expected the JSON of a function call ({error})") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        _refuse(where, "value", value, "the JSON of a function call, {name, arguments}, or of a list of them")
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def _answer(row: Row, name: str, where: str) -> Turns:
    """Return `chosen` or `rejected`, one turn of the model or its text, as messages."""
    value = row.get(name)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Mapping) and value.get("role") is not None:
        value = [value]
    if isinstance(value, list):
        return read_messages(value, name, where)
    return [_turn(value, True, f"{where}, {name}")]


def _system(row: Row, where: str) -> Turns:
    absent = row.get("system") in (None, "")
    return [] if absent else [{"role": "system", "content": _string(row, "system", where)}]


def _one_system(column: Turns, own: Turns, row: Row, where: str) -> Turns:
    """Return the system message of the column or of the conversation. Raises DataError if both differ."""
    if column and own and column != own:
        _refuse(where, "system", row["system"], "none with conversations that begin with another system message")
    return own or column


def _wrapped(tools: Any) -> Any:
    """Return plain functions, {name, parameters}, as chat templates expect them; other values unchanged."""
    if tools == "":
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return tools  # refused where all `tools` are read
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": tool} if isinstance(tool, dict) and "name" in tool else tool for tool in tools
    ]


def _string(row: Row, name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        _refuse(where, name, value, "a string")
    return value


def _refuse(where: str, name: str, value: Any, expected: str) -> NoReturn:
    raise DataError(f"{where}: {name}={str(value)[:80]!r}: expected {expected} (data.columns)")
