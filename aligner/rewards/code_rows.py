"""The tests of a row, for the reward `code`.

Columns, as the public sets have them (JSON, or its text), the first of these that a row has:
    input_output        APPS, TACO: {"inputs": [...], "outputs": [...]}, with "fn_name" arguments and results
    tests               [{"input": ..., "output": ...}, ...], with "fn_name" arguments and result; or as input_output
    public_test_cases   LiveCodeBench, with private_test_cases; "testtype": "functional" with func_name in metadata
    test_list           MBPP: asserts, with test_setup_code or test_imports
    test                HumanEval: a function `check` of the function entry_point
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.errors import RewardError
from aligner.rewards.code_blocks import blocks
from aligner.sandbox.subjects import UNREADABLE, Tests
from aligner.types import Prompt

COLUMNS = ("input_output", "tests", "public_test_cases", "test_list", "test")


@dataclass(frozen=True)
class Streams:
    """A test of a program's standard input and output."""

    stdin: str
    expected: str


Spec = dict[str, Any]  # a test of what functions return, for the process that judges (sandbox/verdicts.py)


def tests_of(prompt: Prompt) -> list[Streams | Spec] | None:
    """Return the tests of a row; None if its column is null. Raises RewardError for tests that cannot be read."""
    fields = prompt.fields
    column = next((name for name in COLUMNS if fields.get(name) is not None), None)
    if column is None:
        if fields.keys() & set(COLUMNS):
            return None
        have = ", ".join(fields) or "none"
        raise RewardError(f"expected a column of tests, one of {', '.join(COLUMNS)}; the dataset has {have}")
    try:
        tests = _READERS[column](fields)
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise _unreadable(fields, column, f"{type(cause).__name__}: {cause}") from cause
    if not tests:
        raise RewardError(f"column {column}: expected at least one test")
    helpers = _helpers(prompt) if column == "test" else []
    return [test if isinstance(test, Streams) or "call" in test else {**test, "helpers": helpers} for test in tests]


def check(prompt: Prompt) -> None:
    """Check that the tests can be read, and evaluated apart from the program. Raises RewardError."""
    tests = tests_of(prompt)
    for test in tests or ():
        if isinstance(test, Streams) or "call" in test:
            continue
        column = "test" if test["check"] else "test_list"
        try:
            read = Tests(test["setup"], test["tests"], test["entry"], test["helpers"])
            read.subjects()
            if test["check"] and "check" not in read.defined():
                raise ValueError("it defines no function `check`")
        except UNREADABLE as cause:
            raise _unreadable(prompt.fields, column, f"{type(cause).__name__}: {cause}") from cause
        break  # the others of the row are read with it


def _unreadable(fields: Mapping[str, Any], column: str, why: str) -> RewardError:
    where = f"column {column}={str(fields[column])[:120]!r}"
    return RewardError(f"{where}: expected tests in a format of reward `code`, see its docs ({why})")


def _helpers(prompt: Prompt) -> list[str]:
    """Return texts of the prompt, which may define functions that the tests use, as in HumanEval."""
    shown = prompt.messages[-1].get("content") if prompt.messages else prompt.text
    return [shown, *(text for _, text in blocks(shown))] if isinstance(shown, str) else []


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _text(value: Any) -> str:
    """Return a stream as text; some rows hold its lines."""
    if isinstance(value, Mapping):
        raise TypeError(f"{value!r} is no text")
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _call(name: Any, args: Sequence[Any], expected: Any) -> Spec:
    if not isinstance(name, str):
        raise TypeError(f"the name of a function is {name!r}")
    return {"call": name, "args": list(args), "expected": expected}


def _apps(fields: Mapping[str, Any]) -> list[Streams | Spec]:
    return _table(_json(fields["input_output"]))


def _table(table: Mapping[str, Any]) -> list[Streams | Spec]:
    pairs = list(zip(table["inputs"], table["outputs"], strict=True))
    if name := table.get("fn_name"):
        return [_call(name, args, expected) for args, expected in pairs]
    return [Streams(_text(stdin), _text(expected)) for stdin, expected in pairs]


def _pairs(fields: Mapping[str, Any]) -> list[Streams | Spec]:
    tests = _json(fields["tests"])
    return _table(tests) if isinstance(tests, Mapping) else [_pair(test, {}) for test in tests]


def _livecodebench(fields: Mapping[str, Any]) -> list[Streams | Spec]:
    """Read public and private tests.

    LiveCodeBench ships private tests as base64 of a pickle. Reading one runs code, so users who trust it convert it to
    JSON.
    """
    meta = _json(fields.get("metadata") or "{}")
    names = ("public_test_cases", "private_test_cases")
    return [_pair(test, meta) for name in names for test in _json(fields.get(name) or "[]")]


def _pair(test: Mapping[str, Any], meta: Mapping[str, Any]) -> Streams | Spec:
    """Read a call in LiveCodeBench's form, with values as JSON text, or in PrimeIntellect's; else streams."""
    if test.get("testtype") == "functional":
        name = (_json(test.get("metadata") or "{}") | meta)["func_name"]
        return _call(name, [json.loads(line) for line in test["input"].splitlines()], json.loads(test["output"]))
    if test.get("fn_name") is not None or test.get("type") == "function_call":
        if not isinstance(test["input"], list):
            raise TypeError(f"the arguments of a function are {test['input']!r:.80}: expected a list")
        return _call(test.get("fn_name"), test["input"], test["output"])
    return Streams(_text(test["input"]), _text(test["output"]))


def _mbpp(fields: Mapping[str, Any]) -> list[Streams | Spec]:
    tests = list(_json(fields["test_list"]))
    return [_asserts(fields, tests, index) for index in range(len(tests))]


def _humaneval(fields: Mapping[str, Any]) -> list[Streams | Spec]:
    return [_asserts(fields, [fields["test"]], 0, fields["entry_point"])]


def _asserts(fields: Mapping[str, Any], tests: list[str], index: int, check: str = "") -> Spec:
    setup = [fields.get("test_setup_code") or "", *(_json(fields.get("test_imports") or "[]"))]
    entry = fields.get("entry_point") or []
    entry = [entry] if isinstance(entry, str) else list(entry)
    for text in (*setup, *tests, *entry):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is no text")
    return {"setup": "\n".join(setup), "tests": tests, "place": index, "entry": entry, "check": check}


_READERS = dict(zip(COLUMNS, (_apps, _pairs, _livecodebench, _mbpp, _humaneval), strict=True))
