"""Bootstrap intervals against the normal approximation, and against what belongs together."""

import numpy as np
import pytest

from aligner.ops.intervals import bootstrap


def test_a_share_has_the_interval_of_the_normal_approximation():
    right = (np.random.default_rng(1).random(900) < 0.3).astype(float)
    low, high = bootstrap(right, np.ones(900))
    half = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 900)
    assert (low, high) == pytest.approx((right.mean() - half, right.mean() + half), abs=0.1 * half)
    assert bootstrap(right, np.ones(900)) == (low, high)


def test_units_stay_together():
    """Four equal samples of a prompt tell no more than one; units of many tokens count by their tokens."""
    right = (np.random.default_rng(2).random(200) < 0.5).astype(float)
    four, one = bootstrap(4 * right, np.full(200, 4.0)), bootstrap(right, np.ones(200))
    assert four == pytest.approx(one)
    apart = bootstrap(np.repeat(right, 4), np.ones(800))
    assert apart[1] - apart[0] < 0.6 * (one[1] - one[0])
    low, high = bootstrap([0.0, 99.0], [1.0, 99.0])
    assert low == 0.0 and high == 1.0


def test_equal_units_give_a_point():
    assert bootstrap([1.0] * 5, [1.0] * 5) == (1.0, 1.0)
