"""Rewards by rules: math answers, exact answers, a format, a length.

The reference answer is a column of the dataset row (`Prompt.fields`). A row where it is null or NaN scores None; a
dataset without that column is an error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from aligner.errors import RewardError
from aligner.rewards.base import NotApplicable
from aligner.rewards.math_words import is_placeholder
from aligner.rewards.math_worker import is_number
from aligner.types import Prompt, Sample

_local = threading.local()


def reference(prompt: Prompt, field: str) -> Any:
    """Return the row's column `field`; None if it is NaN, as tables write a missing value. Raises RewardError if there
    is no such column."""
    if field not in prompt.fields:
        have = ", ".join(prompt.fields) or "none"
        raise RewardError(f"args.field={field!r}: expected a column of the dataset, which has {have}")
    value = prompt.fields[field]
    return None if isinstance(value, float) and value != value else value


def math(samples: Sequence[Sample], field: str = "answer", timeout_s: float = 5.0) -> list[float | None]:
    r"""Return 1.0 if the response's final answer is mathematically equal to the row's, by math-verify; else 0.0.

    Reference answers: numbers, with a unit or without, LaTeX with or without dollars, `\boxed{}`, gsm8k solutions that
    end in `#### 42`, a letter of multiple choice, or words (docs/reference/rewards.md). Each thread that scores owns a
    helper process. A response that takes longer than `timeout_s` or kills the helper scores 0.0.
    """
    golds = [reference(sample.prompt, field) for sample in samples]
    return [
        None if gold is None or is_placeholder(_text(gold)) else _ask(gold, sample.response, timeout_s)
        for gold, sample in zip(golds, samples, strict=True)
    ]


def unreadable(prompts: Sequence[Prompt], field: str = "answer", timeout_s: float = 5.0) -> dict[int, str]:
    """Return by index why the references of rows cannot be read: no answer to them would score."""
    causes: dict[int, str] = {}
    for index, gold in enumerate(reference(prompt, field) for prompt in prompts):
        if gold is None:
            causes[index] = NotApplicable(f"`{field}` is null or NaN, and no other reward scores the row")
            continue
        try:
            if not is_number(_text(gold)) and not _ask(gold, None, timeout_s):
                causes[index] = f"the reference answer {str(gold)[:200]!r} takes longer than {timeout_s:g} s to read"
        except RewardError as cause:
            causes[index] = str(cause)
    return causes


math.per_sample = True  # type: ignore[attr-defined]
math.late_score = 0.0  # type: ignore[attr-defined]
math.unreadable = unreadable  # type: ignore[attr-defined]


def _text(gold: Any) -> str:
    if isinstance(gold, list | tuple) and len(gold) == 1:
        return _text(gold[0])
    if isinstance(gold, list | tuple | dict):
        raise RewardError(f"the reference answer is {gold!r:.200}: expected one text or number")
    return f"{Decimal(repr(gold)):f}" if isinstance(gold, float) else str(gold)  # 1e-05 would be 1 e - 5


def _ask(gold: Any, response: str | None, timeout_s: float) -> float:
    """Return the score from this thread's helper; 0.0 if it exceeds time or memory."""
    process = _helper()
    request = {"gold": _text(gold), "response": response, "timeout_s": timeout_s}
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        _local.helper = None
        code = process.wait()
        if code >= 0:  # it was not killed: an error of installation, not of this answer
            raise RewardError(f"the math-verify helper process ended with exit code {code}; its message is above")
        return 0.0
    reply = json.loads(line)
    if "error" in reply:
        raise RewardError(reply["error"])
    return reply["score"]


def _helper() -> subprocess.Popen:
    """Return this thread's helper process; start it if there is none. It ends when its standard input is closed."""
    helper = getattr(_local, "helper", None)
    if helper is None or helper.poll() is not None:
        command = [sys.executable, "-P", "-m", "aligner.rewards.math_worker"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=env
        )
        _local.helper = helper
    return helper


def exact_match(
    samples: Sequence[Sample], field: str = "answer", strip: bool = True, ignore_case: bool = False
) -> list[float | None]:
    """Return 1.0 if the response is the row's answer, character by character; else 0.0."""

    def normal(text: Any) -> str:
        text = str(text).strip() if strip else str(text)
        return text.casefold() if ignore_case else text

    golds = [reference(sample.prompt, field) for sample in samples]
    return [
        None if gold is None else float(normal(gold) == normal(sample.response))
        for sample, gold in zip(samples, golds, strict=True)
    ]


def format(samples: Sequence[Sample], pattern: str) -> list[float | None]:
    r"""Return 1.0 if the response contains the regular expression (anchor it with \A and \Z for all of it), else 0.0.

    `.` also matches line breaks.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(sample.response) is not None) for sample in samples]


def length(samples: Sequence[Sample], limit: int, buffer: int = 0) -> list[float | None]:
    """Return a soft penalty of long responses: 0 up to limit - buffer tokens, falling linearly to -1 at `limit`, -1
    beyond.

    DAPO (arXiv 2503.14476), equation 13: limit is L_max, buffer is L_cache.
    """
    if not 0 <= buffer <= limit:
        raise RewardError(f"args.buffer={buffer}: expected a number of tokens in [0, args.limit={limit}]")

    def one(tokens: int) -> float:
        if tokens <= limit - buffer:
            return 0.0
        return -1.0 if tokens >= limit else (limit - buffer - tokens) / buffer

    return [one(len(sample.tokens)) for sample in samples]


length.best_score = 0.0  # type: ignore[attr-defined]
