"""Lengths of responses: exponential around a mean, or read from a file."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import exp, isinf
from pathlib import Path
from random import Random

from aligner.errors import ConfigError

KEY = "--lengths"


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, at most `longest`. `counts`: (length, responses), ascending; without any, lengths are
    exponential."""

    mean: float
    longest: int
    counts: tuple[tuple[int, int], ...] = ()

    @cached_property
    def _decay(self) -> float:
        return decay(self.mean, self.longest)

    @cached_property
    def _ends(self) -> list[int]:
        """Number of responses that have ended, by length."""
        return list(accumulate(count for _, count in self.counts))

    def alive(self, t: float) -> float:
        """Return the share of responses that are longer than `t`."""
        if not self.counts:
            return exp(-t / self._decay)
        ended = bisect_right(self.counts, t, key=lambda each: each[0])
        return 1 - self._ends[ended - 1] / self._ends[-1] if ended else 1.0

    def drawn(self) -> Iterator[int]:
        """Yield lengths without end, the same ones each time."""
        draw = Random(0)
        while self.counts:
            yield self.counts[bisect_right(self._ends, draw.randrange(self._ends[-1]))][0]
        while True:
            length = self.longest if isinf(self._decay) else draw.expovariate(1 / self._decay)
            yield max(1, min(self.longest, round(length)))


def decay(mean: float, longest: float) -> float:
    """Return the decay of exponential lengths that are cut at `longest` and have this mean. Infinite if all are of the
    longest length."""
    if mean >= 0.999 * longest:
        return float("inf")
    low, high = 1e-3 * mean, 1e4 * longest
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * (1 - exp(-longest / middle)) < mean else (low, middle)
    return high


def read_lengths(path: str) -> tuple[tuple[int, int], ...]:
    """Read a text file: on each line a length in tokens, optionally followed by the number of responses. Raises
    ConfigError."""
    counts: Counter[int] = Counter()
    try:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            length, count = map(int, (*line.split(), "1")[:2])
            if length < 1 or count < 1 or len(line.split()) > 2:
                raise ValueError(f"line {number}: {line!r}")
            counts[length] += count
    except (OSError, ValueError) as error:
        expected = f"a text file with a length in tokens on each line, perhaps with how many have it ({error})"
        raise ConfigError(KEY, path, expected) from None
    if not counts:
        raise ConfigError(KEY, path, "a file with at least one length")
    return tuple(sorted(counts.items()))
