"""The reward `code`: the program of an answer, run in a sandbox against the tests of its row.

Columns, as the public sets have them (JSON, or its text), the first of these that a row has:
    input_output        APPS, TACO: {"inputs": [...], "outputs": [...]}, with "fn_name" arguments and results
    tests               [{"input": ..., "output": ...}, ...]
    public_test_cases   LiveCodeBench, with private_test_cases; "testtype": "functional" with func_name in metadata
    test_list           MBPP: asserts, with test_setup_code or test_imports
    test                HumanEval: a function `check` of the function entry_point
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from aligner.errors import RewardError, SandboxError
from aligner.rewards.sandbox.run import Ended, Given, Sandbox
from aligner.types import Prompt, Sample

COLUMNS = ("input_output", "tests", "public_test_cases", "test_list", "test")
LANGUAGES = ("", "python", "python3", "py")
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


class Verdict(StrEnum):
    """Of a program: that of its first test that fails."""

    PASSED = "passed"
    WRONG = "wrong"  # another output, result, or an assertion that does not hold
    ERROR = "error"  # an exception, a crash, something that the sandbox does not allow
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"  # too much of it
    HUNG = "hung"  # did nothing for long
    NO_CODE = "no_code"  # no fenced block of Python in the answer
    FAILED = "failed"  # of the sandbox, not of the program: no score


@dataclass(frozen=True)
class Case:
    test: Given
    expected: Any = None  # output (text), result of a call (JSON); asserts have none

    def verdict(self, ended: Ended) -> Verdict:
        if ended.how != "exit":
            return Verdict(ended.how)
        if ended.code or (self.test.check and ended.said is None):
            return Verdict.ERROR
        if "code" in self.test.check:
            return Verdict.PASSED
        if "call" not in self.test.check:
            return Verdict.PASSED if _words(ended.out) == _words(self.expected) else Verdict.WRONG
        try:
            right = json.loads(ended.said or "") in (self.expected, _only(self.expected))
        except (ValueError, RecursionError):  # a program may say anything
            return Verdict.ERROR
        return Verdict.PASSED if right else Verdict.WRONG


class Code:
    """The fraction of tests that pass, or with all_or_none 1.0 where all do, else 0.0. Limits are those of one test;
    behind one that uses up its time no further test is run. NaN where the sandbox fails."""

    per_sample: ClassVar[bool] = True
    may_fail: ClassVar[bool] = True
    late_score: ClassVar[float] = math.nan  # what a busy machine has not run yet is not wrong

    def __init__(
        self,
        all_or_none: bool = False,
        cpu_s: int = 4,
        memory_mb: int = 1024,
        output_mb: int = 8,
        tier: str = "auto",
    ):
        self.all_or_none = all_or_none
        self.sandbox = Sandbox(tier, cpu_s, memory_mb, output_mb)
        self._failure = "no score within reward.timeout_s"
        self._counts: Counter[Verdict] = Counter()
        self._lock = threading.Lock()

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self._score(sample) for sample in samples]

    def unreadable(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """By place, why the tests of some of these rows cannot be read."""
        found = {}
        for place, prompt in enumerate(prompts):
            try:
                cases(prompt.fields)
            except RewardError as cause:
                found[place] = str(cause)
        return found

    def failure(self) -> str:
        """The last one of the sandbox, or that time is up."""
        return self._failure

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """verdict -> (answers, all answers) since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {verdict.value: (float(counts[verdict]), float(counts.total())) for verdict in Verdict}

    def _score(self, sample: Sample) -> float | None:
        found = cases(sample.prompt.fields)
        if found is None:
            return None
        verdict, passed = self._verdict(program(sample.response), found)
        with self._lock:
            self._counts[verdict] += 1
        if verdict is Verdict.FAILED:
            return math.nan
        return float(passed == len(found)) if self.all_or_none else passed / len(found)

    def _verdict(self, code: str | None, found: Sequence[Case]) -> tuple[Verdict, int]:
        """And how many tests passed."""
        if code is None:
            return Verdict.NO_CODE, 0
        verdict, passed = Verdict.PASSED, 0
        try:
            with closing(self.sandbox.run(code, [case.test for case in found])) as runs:
                for case, ended in zip(found, runs, strict=True):
                    one = case.verdict(ended)
                    passed += one is Verdict.PASSED
                    verdict = one if verdict is Verdict.PASSED else verdict
                    if one in (Verdict.CPU, Verdict.HUNG) or (self.all_or_none and one is not Verdict.PASSED):
                        break
        except SandboxError as error:
            self._failure = str(error)
            return Verdict.FAILED, 0
        return verdict, passed


def program(response: str) -> str | None:
    """The last whole fenced block of Python, or of no language."""
    blocks = [text for language, text in _BLOCK.findall(response) if language.lower() in LANGUAGES]
    return blocks[-1] if blocks else None


def cases(fields: Mapping[str, Any]) -> list[Case] | None:
    """The tests of a row; None where its column is null. Raises RewardError for what cannot be read."""
    column = next((name for name in COLUMNS if fields.get(name) is not None), None)
    if column is None:
        if fields.keys() & set(COLUMNS):
            return None
        have = ", ".join(fields) or "none"
        raise RewardError(f"expected a column of tests, one of {', '.join(COLUMNS)}; the dataset has {have}")
    try:
        found = _READERS[column](fields)
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        where, why = f"column {column}={str(fields[column])[:120]!r}", f"{type(cause).__name__}: {cause}"
        raise RewardError(f"{where}: expected tests as the docs of reward `code` have them ({why})") from cause
    if not found:
        raise RewardError(f"column {column}: expected at least one test")
    return found


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _text(value: Any) -> str:
    """A stream; some rows have its lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _apps(fields: Mapping[str, Any]) -> list[Case]:
    table = _json(fields["input_output"])
    pairs = list(zip(table["inputs"], table["outputs"], strict=True))
    if name := table.get("fn_name"):
        return [Case(Given(check={"call": name, "args": list(given)}), expected) for given, expected in pairs]
    return [Case(Given(_text(given)), _text(expected)) for given, expected in pairs]


def _pairs(fields: Mapping[str, Any]) -> list[Case]:
    return [_pair(test, {}) for test in _json(fields["tests"])]


def _livecodebench(fields: Mapping[str, Any]) -> list[Case]:
    """Its private tests come as base64 of a pickle: reading one runs code, so whoever trusts it has to make JSON."""
    meta = _json(fields.get("metadata") or "{}")
    names = ("public_test_cases", "private_test_cases")
    return [_pair(test, meta) for name in names for test in _json(fields.get(name) or "[]")]


def _pair(test: Mapping[str, Any], meta: Mapping[str, Any]) -> Case:
    if test.get("testtype") != "functional":
        return Case(Given(_text(test["input"])), _text(test["output"]))
    given = [json.loads(line) for line in test["input"].splitlines()]
    return Case(Given(check={"call": meta["func_name"], "args": given}), json.loads(test["output"]))


def _mbpp(fields: Mapping[str, Any]) -> list[Case]:
    setup = [fields.get("test_setup_code") or "", *(_json(fields.get("test_imports") or "[]"))]
    return [Case(Given(check={"code": "\n".join([*setup, test])})) for test in _json(fields["test_list"])]


def _humaneval(fields: Mapping[str, Any]) -> list[Case]:
    return [Case(Given(check={"code": f"{fields['test']}\ncheck({fields['entry_point']})"}))]


_READERS = dict(zip(COLUMNS, (_apps, _pairs, _livecodebench, _mbpp, _humaneval), strict=True))


def _only(expected: Any) -> Any:
    """APPS has some results in a list of one."""
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def _words(text: str) -> list[list[str]]:
    """Of each line, without blank lines at the end: blanks do not count, numbers are compared as they are written."""
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
