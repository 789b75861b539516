"""Confidence intervals of measured means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
METHOD = f"{LEVEL:.0%}, percentiles of {RESAMPLES} bootstrap resamples"


def bootstrap(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the interval of sum(numerators) / sum(denominators), float [N] each, by the percentile method (Efron
    1979). Units (prompts, pairs, rows) are drawn with replacement, so that each unit stays together. If all units are
    equal, the interval is a point, whatever N. Draws of units that all have denominator 0 are left out."""
    return bootstrap_of_sums((numerators, denominators), lambda s: s[0] / s[1] if s[1] else np.nan, seed)


def bootstrap_of_sums(
    columns: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float], seed: int = 0
) -> tuple[float, float]:
    """Return the interval of a `statistic` of the columns' sums over units, likewise. Draws where it is NaN are left
    out."""
    values = [np.asarray(column, dtype=np.float64) for column in columns]
    generator, count = np.random.default_rng(seed), len(values[0])
    drawn_values = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = generator.integers(0, count, count)
        drawn_values[i] = statistic([value[drawn].sum() for value in values])
    low, high = np.nanquantile(drawn_values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
