"""Lengths of responses: lognormal around a mean, or read from a file."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import exp, inf, log
from pathlib import Path
from random import Random
from statistics import NormalDist

from aligner.errors import ConfigError

KEY, NORMAL = "--lengths", NormalDist()
DEVIATION_PARTS = 256  # in which a deviation is summed
SPREAD = 0.8  # standard deviation of the logarithm of response lengths: a choice, not measured


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, at most `longest`, where those that would be longer end. `counts`: (length, responses),
    ascending; without any, lengths are lognormal."""

    mean: float
    longest: int
    counts: tuple[tuple[int, int], ...] = ()

    @cached_property
    def _median(self) -> float:
        """Median for which lengths that end at `longest` have this mean; infinite if all are of the longest length."""
        if self.mean >= 0.999 * self.longest:
            return inf
        low, high = 1e-3 * self.mean, 1e4 * self.longest
        for _ in range(80):
            middle = (low * high) ** 0.5
            end = log(self.longest / middle) / SPREAD
            mean = middle * exp(SPREAD**2 / 2) * NORMAL.cdf(end - SPREAD) + self.longest * NORMAL.cdf(-end)
            low, high = (middle, high) if mean < self.mean else (low, middle)
        return high

    @cached_property
    def _ends(self) -> list[int]:
        """Number of responses that have ended, by length."""
        return list(accumulate(count for _, count in self.counts))

    def alive(self, t: float) -> float:
        """Return the share of responses that are longer than `t`, which is above 0 and below the longest."""
        if not self.counts:
            return NORMAL.cdf(log(self._median / t) / SPREAD)
        ended = bisect_right(self.counts, t, key=lambda each: each[0])
        return 1 - self._ends[ended - 1] / self._ends[-1] if ended else 1.0

    @property
    def deviation(self) -> float:
        """Return their standard deviation."""
        width = self.longest / DEVIATION_PARTS
        middles = [(i + 0.5) * width for i in range(DEVIATION_PARTS)]
        squares = sum(2 * t * self.alive(t) * width for t in middles)
        return max(0.0, squares - self.mean**2) ** 0.5

    def drawn(self) -> Iterator[int]:
        """Yield lengths without end, the same ones each time."""
        draw = Random(0)
        while self.counts:
            yield self.counts[bisect_right(self._ends, draw.randrange(self._ends[-1]))][0]
        while True:
            length = self._median * exp(draw.gauss(0, SPREAD))
            yield max(1, round(min(self.longest, length)))


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
