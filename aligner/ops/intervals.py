"""Confidence intervals of measured means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
METHOD = f"{LEVEL:.0%}, percentiles of {RESAMPLES} bootstrap resamples"


def bootstrap(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the interval of sum(numerators) / sum(denominators), float [N] each, by the percentile method (Efron
    1979). Units (prompts, pairs, rows) are drawn with replacement, so that each unit stays together. If all units are
    equal, the interval is a point, whatever N. Draws of units that all have denominator 0 are left out."""
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    generator, count = np.random.default_rng(seed), len(top)
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = generator.integers(0, count, count)
        weight = bottom[drawn].sum()
        means[i] = top[drawn].sum() / weight if weight else np.nan
    low, high = np.nanquantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
