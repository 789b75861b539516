"""The reward `code`: a response's program, run in a sandbox against the tests of its row (code_rows.py).

Outputs are compared here, results of functions in a separate process (sandbox/verdicts.py). The program's process holds
nothing that decides its score.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from enum import StrEnum
from typing import ClassVar

from aligner.errors import RewardError, SandboxError
from aligner.rewards.code_blocks import programs
from aligner.rewards.code_rows import Spec, Streams, check, tests_of
from aligner.sandbox.run import Sandbox
from aligner.sandbox.session import RunEnd
from aligner.types import Prompt, Sample

PAUSES_S = (1.0, 5.0, 20.0)  # before each retry of a failed sandbox


class Verdict(StrEnum):
    """Verdicts of a program: that of its first failing test."""

    PASSED = "passed"
    WRONG = "wrong"  # another output, result, or an assertion that does not hold
    ERROR = "error"  # an exception, a crash, something that the sandbox does not allow
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"  # too much of it
    HUNG = "hung"  # waited for long
    UNJUDGED = "unjudged"  # a result that is no data, or the row's own test failed: no comparison
    NO_CODE = "no_code"  # no fenced block of Python in the response
    FAILED = "failed"  # of the sandbox, not of the program: no score


class Code:
    """The fraction of tests that pass; with all_or_none 1.0 if all do, else 0.0.

    Limits are per test; after a test that uses up its time no further test runs. NaN if no sandbox can be started.
    """

    per_sample: ClassVar[bool] = True
    may_fail: ClassVar[bool] = True
    bounded: ClassVar[bool] = True

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
        self._failure = "no program has failed to run"
        self._counts: Counter[Verdict] = Counter()
        self._lock = threading.Lock()

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self._score(sample) for sample in samples]

    def unreadable(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Return by index why the tests of rows cannot be read."""
        causes = {}
        for index, prompt in enumerate(prompts):
            try:
                check(prompt)
            except RewardError as cause:
                causes[index] = str(cause)
        return causes

    def failure(self) -> str:
        """Return the last failure of the sandbox."""
        return self._failure

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """Return verdict -> (responses, all responses) since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {verdict.value: (float(counts[verdict]), float(counts.total())) for verdict in Verdict}

    def _score(self, sample: Sample) -> float | None:
        tests = tests_of(sample.prompt)
        if tests is None:
            return None
        verdict, passed = self._verdict(programs(sample.response), tests)
        with self._lock:
            self._counts[verdict] += 1
        if verdict is Verdict.FAILED:
            return math.nan
        return float(passed == len(tests)) if self.all_or_none else passed / len(tests)

    def _verdict(self, texts: Sequence[str], tests: Sequence[Streams | Spec]) -> tuple[Verdict, int]:
        """Return the verdict and how many tests passed.

        If a program's sandbox fails repeatedly while another program runs, the program broke it and is an ERROR: a
        missing score would let a model end its run.
        """
        if not texts:
            return Verdict.NO_CODE, 0
        for pause_s in (0.0, *PAUSES_S):
            time.sleep(pause_s)
            try:
                return self._tried(texts, tests)
            except SandboxError as error:
                self._failure = str(error)
        return (Verdict.FAILED if self.sandbox.works() else Verdict.ERROR), 0

    def _tried(self, texts: Sequence[str], tests: Sequence[Streams | Spec]) -> tuple[Verdict, int]:
        verdict, passed = Verdict.PASSED, 0
        with closing(self._verdicts(texts, tests)) as verdicts:
            for one in verdicts:
                passed += one is Verdict.PASSED
                verdict = one if verdict is Verdict.PASSED else verdict
                if one in (Verdict.CPU, Verdict.HUNG) or (self.all_or_none and one is not Verdict.PASSED):
                    break
        return verdict, passed

    def _verdicts(self, texts: Sequence[str], tests: Sequence[Streams | Spec]) -> Iterator[Verdict]:
        for kind, group in itertools.groupby(tests, type):
            several = list(group)
            if kind is Streams:
                with closing(self.sandbox.run(texts, [test.stdin for test in several])) as runs:  # type: ignore[union-attr]
                    for test, ended in zip(several, runs, strict=True):
                        yield _of_streams(test, ended)  # type: ignore[arg-type]
            else:
                with closing(self.sandbox.judge(texts, several)) as runs:  # type: ignore[arg-type]
                    for ended in runs:
                        yield _verdict(ended)


def _verdict(ended: RunEnd) -> Verdict:
    """Return the verdict of a run. A program that ends before it has answered is an ERROR."""
    return Verdict.ERROR if ended.how in ("exit", "protocol") else Verdict(ended.how)


def _of_streams(test: Streams, ended: RunEnd) -> Verdict:
    if ended.how != "exit" or ended.code:
        return _verdict(ended)
    return Verdict.PASSED if _words(ended.out) == _words(test.expected) else Verdict.WRONG


def _words(text: str) -> list[list[str]]:
    """Return the words of each line, without blank lines at the end: blanks do not count, numbers are compared as
    written."""
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
