"""The choice of tokens by covariance, against sorting everything in one place."""

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops.rl.covariance import choose_random, choose_top, covariance, token_keys


def case(seed, b=6, t=8):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, t, generator=g), -torch.rand(b, t, generator=g), (torch.rand(b, t, generator=g) < 0.6).float()


@given(seed=st.integers(0, 999))
def test_covariance_equals_a_loop(seed):
    a, lp, m = case(seed)
    at = m.nonzero().tolist()
    mean_a, mean_lp = (fmean(float(x[i, j]) for i, j in at) for x in (a, lp))
    got = covariance(a.masked_fill(m == 0, math.nan), lp, m)
    for i, j in at:
        assert float(got[i, j]) == pytest.approx((float(a[i, j]) - mean_a) * (float(lp[i, j]) - mean_lp), abs=1e-9)
    assert (got[m == 0] == 0).all() and got.dtype == torch.float64


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), fraction=st.floats(0, 1), low=st.floats(-0.5, 0.5))
def test_choices_against_one_sorted_list(seed, fraction, low):
    a, lp, m = case(seed)
    cov, keys = covariance(a, lp, m), token_keys(torch.arange(100, 106), 8)
    at = [tuple(x) for x in m.nonzero().tolist()]
    count = max(1, int(fraction * len(at)))
    top = sorted(at, key=lambda x: (-float(cov[x]), int(keys[x])))[:count]
    inside = sorted((x for x in at if low < float(cov[x]) < low + 0.3), key=lambda x: int(keys[x]))[:count]
    for got, want in (
        (choose_top(cov, m, keys, fraction), top),
        (choose_random(cov, m, keys, fraction, low, low + 0.3), inside),
    ):
        assert sorted(tuple(x) for x in got.nonzero().tolist()) == sorted(want)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(6)), padding=st.integers(0, 5))
def test_the_choice_follows_the_rows(seed, order, padding):
    """Rows in another order, with more padding: the same tokens of the same rows."""
    a, lp, m = case(seed)
    order = torch.tensor(order)

    def chosen(rows, width):
        x, y, z = (torch.nn.functional.pad(v[rows], (0, width)) for v in (a, lp, m))
        keys = token_keys(rows * 17, 8 + width)
        return choose_random(covariance(x, y, z), z, keys, 0.3, -0.2, 0.2)[:, :8]

    assert torch.equal(chosen(torch.arange(6), 0)[order], chosen(order, padding))


def test_random_choices_are_random():
    keys = torch.stack([token_keys(torch.tensor([row]), 50)[0] for row in range(200)])
    assert keys.unique().numel() == keys.numel() and (keys >= 0).all()
    mask = torch.ones(1, 50)
    counts = sum(choose_random(mask * 2.0, mask, keys[i : i + 1], 0.2, 1, 5) for i in range(200))
    assert (counts - 40).abs().max() < 25  # 200 x 0.2 of each


def test_nothing_to_choose_from():
    a, lp, m = case(0)
    keys = token_keys(torch.arange(6), 8)
    assert choose_random(covariance(a, lp, m), m, keys, 0.5, 1e6, 2e6).sum() == 0
    empty = torch.zeros_like(m)
    assert choose_top(covariance(a, lp, empty), empty, keys, 0.5).sum() == 0
