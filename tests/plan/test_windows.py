"""The clock of windows on paper."""

import random
from itertools import chain, repeat

import pytest

from aligner.plan.windows import RereadCost, clocked


def test_equal_lengths_by_hand():
    """Each sample takes two windows, with slots for all. With a lag of 1 a step takes the four groups that have been
    flying for two steps, by weights one and two steps old: no one waits, and the slots are full."""
    windows = clocked(repeat(20), (4, 2), 1, 16, 10, 10.0)
    assert (windows.step, windows.engines, windows.trainer) == (10.0, 1.0, 1.0)
    assert (windows.oldest, windows.mean) == (2.0, 1.5)
    halves = clocked(repeat(20), (4, 2), 1, 16, 5, 10.0)  # too small: each step waits for another window
    assert (halves.step, halves.trainer) == (15.0, pytest.approx(2 / 3)) and halves.mean < windows.mean
    again = clocked(
        repeat(20), (4, 2), 1, 16, 10, 10.0, RereadCost(prompt=5, token=0.01)
    )  # of half of the samples, 15 tokens
    assert again.step == pytest.approx(10 + 8 * 15 * 0.01) and again.trainer == pytest.approx(10 / 11.2)


def test_a_long_sample_makes_no_other_wait():
    lengths = chain([1000], repeat(10))
    windows = clocked(lengths, (4, 1), 2, 12, 10, 10.0)
    assert windows.trainer == 1.0 and windows.step == 10.0


def counted(lengths, prompts, group, lag, slots, window, rest, again):
    """(step, trainer, oldest, mean), decode step by decode step."""
    flying, number, took, waited, oldest, ages = [], 0, 0.0, 0.0, [], []

    def turn(version):
        nonlocal number
        number += 1
        reads = sum(again.prompt + len(made) for rows, _ in flying for left, made in rows if left and made)
        steps = 0
        for _ in range(window):
            rows = [row for rows, _ in flying for row in rows if row[0]][:slots]
            steps += bool(rows)
            for row in rows:
                row[0] -= 1
                row[1].append(version)
        for one in flying:
            one[1] = one[1] or (0 if any(left for left, _ in one[0]) else number)
        return steps + again.token * reads

    for step in range(24):
        idle = beside = 0.0
        while True:
            ready = sorted((one for one in flying if one[1]), key=lambda one: one[1])[:prompts]
            if len(ready) == prompts:
                flying = [one for one in flying if not any(one is each for each in ready)]
            while len(flying) <= lag * prompts:
                flying += [[[[next(lengths), []] for _ in range(group)], 0] for _ in range(prompts)]
            if len(ready) == prompts:
                break
            idle += turn(step)
        beside = turn(step)
        if step >= 8:
            took, waited = took + idle + max(beside, rest), waited + idle + max(0.0, beside - rest)
            oldest += [step - made[0] for rows, _ in ready for _, made in rows]
            ages += [step - version for rows, _ in ready for _, made in rows for version in made]
    return took / 16, 1 - waited / took, sum(oldest) / len(oldest), sum(ages) / len(ages)


@pytest.mark.parametrize("seed", range(20))
def test_it_counts_as_one_does_step_by_step(seed):
    draw = random.Random(seed)
    prompts, group, lag, slots, window = (draw.randint(1, most) for most in (4, 3, 3, 9, 12))
    rest, again = draw.uniform(0, 20), RereadCost(prompt=5.0, token=draw.choice([0.0, 0.01]))
    drawn = [draw.randint(1, 30) for _ in range(2000)]
    windows = clocked(iter(drawn), (prompts, group), lag, slots, window, rest, again)
    wanted = counted(iter(drawn), prompts, group, lag, slots, window, rest, again)
    assert (windows.step, windows.trainer, windows.oldest, windows.mean) == pytest.approx(wanted)


def test_small_windows_of_long_responses_are_counted_soon():
    """Window by window and row by row it would take minutes, of each split."""
    windows = clocked(repeat(1024), (64, 16), 1, 128, 1, 1.0)
    assert windows.engines == pytest.approx(1.0, abs=0.01) and windows.waits > 5_000


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_near_a_finer_model(seed):
    """64 x 16 samples of lognormal lengths, 512 slots, a trainer that takes as long: another program, which refills
    slots every 16 steps, gave 5,433 decode steps a step (60 of them for new weights), .94 and .89 busy."""
    draw = random.Random(seed)
    lengths = (min(16384, max(16, round(draw.lognormvariate(7.313, 1.0)))) for _ in repeat(None))
    windows = clocked(lengths, (64, 16), 2, 512, 4800, 64 * 16 * 2406 / 512)
    assert windows.step == pytest.approx(5373, rel=0.06)
    assert windows.engines == pytest.approx(0.94, abs=0.06) and windows.trainer == pytest.approx(0.89, abs=0.06)
