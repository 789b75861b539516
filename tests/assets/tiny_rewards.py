"""Rewards for toy runs: easy to raise, and ways to fail."""

import os
import time
from pathlib import Path


def vowels(samples):
    """The share of vowels among the first four characters."""
    return [sum(c in "aeiouAEIOU" for c in s.response[:4]) / 4 for s in samples]


vowels.per_sample = True  # so runs score while they generate


def probe(samples) -> bool:
    """Whether this is the call with two samples before training."""
    return [s.response for s in samples] == ["0", "probe"]


def fails_at(samples, counter: str, at: int):
    """Like `vowels`, but raises in the `at`-th call of training. `counter` is a file that outlives the process."""
    if probe(samples):
        return vowels(samples)
    if _count(counter) == at:
        raise ZeroDivisionError("the judge is out of order")
    return vowels(samples)


def hangs_at(samples, counter: str, at: int):
    """Like `vowels`, but never comes back from the `at`-th call of training."""
    if not probe(samples) and _count(counter) == at:
        time.sleep(600)
    return vowels(samples)


def _count(counter: str) -> int:
    path = Path(counter)
    calls = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(calls))
    return calls


def raises(samples):
    raise KeyError("answer")


def one_too_many(samples):
    return [0.0] * (len(samples) + 1)


def not_a_number(samples):
    return [float("nan")] * len(samples)


def hangs_on(samples, rank: int, at: int, counter: str):
    """Like `hangs_at`, on one rank only."""
    if os.environ.get("RANK") == str(rank) and not probe(samples) and _count(counter) == at:
        time.sleep(600)
    return vowels(samples)


def even_first(samples):
    """1 for an answer whose first character has an even code, else 0."""
    return [float(bool(s.response) and ord(s.response[0]) % 2 == 0) for s in samples]
