"""The clock of windows on paper."""

import random
from itertools import chain, repeat

import pytest

from aligner.plan.windows import Again, clocked


def test_equal_lengths_by_hand():
    """Each sample takes two windows, with slots for all. With a lag of 1 a step takes the four groups that have been
    flying for two steps, by weights one and two steps old: no one waits, and the slots are full."""
    found = clocked(repeat(20), (4, 2), 1, 16, 10, 10.0)
    assert (found.step, found.engines, found.trainer) == (10.0, 1.0, 1.0)
    assert (found.oldest, found.mean) == (2.0, 1.5)
    halves = clocked(repeat(20), (4, 2), 1, 16, 5, 10.0)  # too small: each step waits for another window
    assert (halves.step, halves.trainer) == (15.0, pytest.approx(2 / 3)) and halves.mean < found.mean
    again = clocked(
        repeat(20), (4, 2), 1, 16, 10, 10.0, Again(prompt=5, token=0.01)
    )  # of half of the samples, 15 tokens
    assert again.step == pytest.approx(10 + 8 * 15 * 0.01) and again.trainer == pytest.approx(10 / 11.2)


def test_a_long_sample_makes_no_other_wait():
    lengths = chain([1000], repeat(10))
    found = clocked(lengths, (4, 1), 2, 12, 10, 10.0)
    assert found.trainer == 1.0 and found.step == 10.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_near_a_finer_model(seed):
    """64 x 16 samples of lognormal lengths, 512 slots, a trainer that takes as long: another program, which refills
    slots every 16 steps, gave 5,433 decode steps a step (60 of them for new weights), .94 and .89 busy."""
    draw = random.Random(seed)
    lengths = (min(16384, max(16, round(draw.lognormvariate(7.313, 1.0)))) for _ in repeat(None))
    found = clocked(lengths, (64, 16), 2, 512, 4800, 64 * 16 * 2406 / 512)
    assert found.step == pytest.approx(5373, rel=0.06)
    assert found.engines == pytest.approx(0.94, abs=0.06) and found.trainer == pytest.approx(0.89, abs=0.06)
