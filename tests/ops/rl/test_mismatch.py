"""Mismatch of engine and trainer: the measures and the corrections, against plain loops in float64."""

import math
from statistics import correlation, fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops.rl.mismatch import (
    cut_sums,
    finish_mismatch,
    geometric_mask,
    icepop,
    mismatch_sums,
    tis_sequence,
    tis_token,
    veto,
    weight_sums,
)


@pytest.fixture
def rows():
    g = torch.Generator().manual_seed(3)
    old, mu = -3 * torch.rand(3, 5, generator=g), -3 * torch.rand(3, 5, generator=g)
    return old, mu, (torch.rand(3, 5, generator=g) < 0.6).float()


def masked(x, m):
    return [float(v) for v, on in zip(x.flatten(), m.flatten(), strict=True) if on]


def reduced(*parts):
    """What ranks add up and divide."""
    names = parts[0][0]
    sums = {n: sum(float(p[0][n][0]) for p in parts) / sum(float(p[0][n][1]) for p in parts) for n in names}
    return finish_mismatch(sums | {n: max(float(p[1][n]) for p in parts) for n in parts[0][1]})


def test_measures(rows):
    old, mu, m = rows
    current, sampled = old + 0.3, mu + 0.5
    lr = [a - b for a, b in zip(masked(old, m), masked(mu, m), strict=True)]
    wanted = {
        "mismatch/token_mult_prob_error": fmean(math.exp(abs(x)) for x in lr),
        "mismatch/logprob_abs_mean": fmean(abs(x) for x in lr),
        "mismatch/logprob_abs_max": max(abs(x) for x in lr),
        "mismatch/gen_kl": fmean(math.exp(x) - 1 - x for x in lr),
        "mismatch/prob_correlation": correlation(*([math.exp(x) for x in masked(side, m)] for side in (old, mu))),
        "mismatch/cut_logprob_mean": 0.5,
        "staleness/logprob_abs_mean": 0.3,
        "staleness/kl": math.exp(0.3) - 1 - 0.3,
    }
    hole = old.masked_fill(m == 0, math.nan)  # what is not masked in may be anything
    cut = cut_sums(mu, sampled, m)
    means, maxima = mismatch_sums(hole, mu, m, current)
    assert reduced((means | cut, maxima)) == pytest.approx(wanted, rel=1e-5)
    # ranks add up, whatever the number of rows on each
    del wanted["mismatch/cut_logprob_mean"]
    parts = [mismatch_sums(old[r], mu[r], m[r], current[r]) for r in (slice(0, 1), slice(1, 3))]
    assert reduced(*parts) == pytest.approx(wanted, rel=1e-5)


def test_staleness_is_apart_from_mismatch(rows):
    old, mu, m = rows
    assert reduced(mismatch_sums(old, mu, m))["staleness/logprob_abs_mean"] == 0
    ahead, same = reduced(mismatch_sums(old, mu, m, old + 1)), reduced(mismatch_sums(old, mu, m))
    moved = {name for name in same if ahead[name] != same[name]}
    assert moved == {"staleness/logprob_abs_mean", "staleness/kl"}


def test_a_perfect_match(rows):
    old, _, m = rows
    actual = reduced(mismatch_sums(old, old, m))
    assert actual["mismatch/token_mult_prob_error"] == 1 and actual["mismatch/logprob_abs_max"] == 0
    assert actual["mismatch/prob_correlation"] == pytest.approx(1)
    flat = torch.full_like(old, -1.0)
    assert math.isnan(reduced(mismatch_sums(flat, old, m))["mismatch/prob_correlation"])


log_ratios = st.lists(st.lists(st.floats(-12, 12, width=32), min_size=4, max_size=4), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(log_ratios, st.integers(0, 2**16), st.floats(1, 6), st.floats(0.01, 0.9), st.floats(1.1, 9))
def test_corrections_are_the_slow_loop(values, bits, cap, low, high):
    lr = torch.tensor(values)
    m = torch.tensor([[(bits >> (4 * i + j)) & 1 for j in range(4)] for i in range(len(values))]).float()
    spoilt = lr.masked_fill(m == 0, math.nan)
    for i, row in enumerate(values):
        on = [x for x, keep in zip(row, m[i], strict=True) if keep]
        product = min(math.exp(min(max(math.fsum(on), -20), 20)), cap)
        mean = math.fsum(on) / max(len(on), 1)
        for t, x in enumerate(row):
            r, inside = math.exp(x), bool(m[i, t])
            assert float(tis_token(spoilt, m, cap)[i, t]) == pytest.approx(min(r, cap) if inside else 1, rel=1e-5)
            assert float(tis_sequence(spoilt, m, cap)[i, t]) == pytest.approx(product if inside else 1, rel=1e-4)
            if min(abs(r - low), abs(r - high)) > 1e-5:
                wanted = (r if low <= r <= high else 0) if inside else 1
                assert float(icepop(spoilt, m, low, high)[i, t]) == pytest.approx(wanted, rel=1e-5)
        if min(abs(mean - math.log(b)) for b in (low, high)) > 1e-9:
            assert bool(geometric_mask(spoilt, m, low, high)[i]) == (math.log(low) <= mean <= math.log(high))
        if all(min(abs(x - math.log(low)), abs(x - math.log(high))) > 1e-9 for x in on):
            assert bool(veto(spoilt, m, low, high)[i]) == all(low <= math.exp(x) <= high for x in on)


def test_what_is_not_a_number_is_rejected(rows):
    m = rows[2]
    lr = torch.zeros(3, 5)
    row, column = (int(x) for x in m.nonzero()[0])
    lr[row, column] = math.nan
    for keep in (geometric_mask(lr, m, 0.99, 1.01), veto(lr, m, 1e-4, 1e4)):
        assert keep.tolist() == [i != row for i in range(3)]
    assert float(icepop(lr, m, 0.5, 5)[row, column]) == 0


def test_weight_sums(rows):
    m, n = rows[2], float(rows[2].sum())
    weights = torch.where(m.bool(), 0.5, 1.0)
    row, column = m.nonzero()[0].tolist()
    weights[row, column] = 0
    for those, mean, zeros in ((weights, 0.5 * (n - 1) / n, 1 / n), (None, 1, 0)):
        by_name = {name: float(a) / float(b) for name, (a, b) in weight_sums(m, those).items()}
        assert by_name == pytest.approx({"mismatch/weight_mean": mean, "mismatch/weight_zero_fraction": zeros})
