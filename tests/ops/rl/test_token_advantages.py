"""Token rewards, returns, whitening and overlong shaping against loops in float64."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.algorithm import AlgorithmConfig, OverlongConfig
from aligner.ops.rl import token_advantages as adv
from aligner.ops.rl.shaping import shaped_rewards, soft_overlong


def gae_loop(r, v, m, gamma, lam):
    """Take out the masked tokens, do textbook GAE by its definition (a double sum), put them back."""
    a = [[0.0] * len(row) for row in r]
    for b in range(len(r)):
        at = [t for t in range(len(m[b])) if m[b][t]]
        rr, vv = [r[b][t] for t in at], [v[b][t] for t in at] + [0.0]
        delta = [rr[i] + gamma * vv[i + 1] - vv[i] for i in range(len(at))]
        for i, t in enumerate(at):
            a[b][t] = sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, len(at)))
    return torch.tensor(a, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    b=st.integers(1, 4),
    t=st.integers(1, 9),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_gae_and_return_to_go(b, t, gamma, lam, seed):
    g = torch.Generator().manual_seed(seed)
    r, v = torch.randn(b, t, generator=g), torch.randn(b, t, generator=g)
    m = (torch.rand(b, t, generator=g) < 0.6).float()
    want = gae_loop(r.tolist(), v.tolist(), m.tolist(), gamma, lam)
    dirty_r, dirty_v = r.masked_fill(m == 0, math.nan), v.masked_fill(m == 0, math.nan)
    a, returns = adv.gae(dirty_r, dirty_v, m, gamma, lam)
    torch.testing.assert_close(a.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns.double(), (want + v) * m, atol=1e-5, rtol=1e-5)
    to_go = adv.return_to_go(dirty_r, m, gamma)
    for row in range(b):
        at = [k for k in range(t) if m[row, k]]
        for i, k in enumerate(at):
            later = math.fsum(gamma ** (j - i) * float(r[row, at[j]]) for j in range(i, len(at)))
            assert float(to_go[row, k]) == pytest.approx(later, abs=1e-5)
    assert (to_go[m == 0] == 0).all()


def test_gae_without_discount_is_return_to_go_less_value():
    r, v, m = torch.tensor([[0.0, 0, 0, 5, 0]]), torch.tensor([[9.0, 1, 2, 3, 9]]), torch.tensor([[0.0, 1, 1, 1, 0]])
    a, returns = adv.gae(r, v, m, 1.0, 1.0)
    assert a.tolist() == [[0, 4, 3, 2, 0]] and returns.tolist() == [[0, 5, 5, 5, 0]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.05, 0.5, 2.0]))
def test_a_lambda_for_each_row_is_that_of_its_length(seed, alpha):
    g = torch.Generator().manual_seed(seed)
    r, v = torch.randn(3, 9, generator=g), torch.randn(3, 9, generator=g)
    m = (torch.rand(3, 9, generator=g) < 0.7).float()
    lam = adv.length_adaptive_lambda(m, alpha)
    a, _ = adv.gae(r, v, m, 0.9, lam)
    for row, tokens in enumerate(m.sum(1).tolist()):
        own = 1 - 1 / (alpha * tokens) if alpha * tokens > 1 else 0.0
        want = gae_loop([r[row].tolist()], [v[row].tolist()], [m[row].tolist()], 0.9, own)[0]
        torch.testing.assert_close(a[row].double(), want, atol=1e-5, rtol=1e-5)
    assert adv.length_adaptive_lambda(torch.ones(1, 40), 0.5).tolist() == pytest.approx([0.95])  # PPO's


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.booleans(), ddof=st.sampled_from([0, 1]))
def test_whitened_values_have_mean_0_and_deviation_1(seed, shift, ddof):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 6, generator=g) * 5 + 100
    m = torch.rand(3, 6, generator=g) < 0.7
    m[0, :2] = True
    inside = x[m].double().tolist()
    mu = statistics.fmean(inside)
    scale = 1 / math.sqrt((statistics.variance(inside) if ddof else statistics.pvariance(inside)) + 1e-8)
    got = adv.whiten(x.masked_fill(~m, math.inf), m.float(), shift_mean=shift, ddof=ddof)
    want = [(v - mu) * scale + (0 if shift else mu) for v in inside]
    torch.testing.assert_close(got[m], torch.tensor(want), atol=1e-5, rtol=1e-5)
    assert (got[~m] == 0).all()


def test_whiten_of_nothing_and_of_one_value():
    assert (adv.whiten(torch.ones(2, 2), torch.zeros(2, 2)) == 0).all()
    one = torch.tensor([[1.0, 0], [0, 0]])
    assert (adv.whiten(torch.full((2, 2), 3.0), one, ddof=1) == 0).all()


def test_token_rewards_equal_a_loop():
    mask = torch.tensor([[0.0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    kl = torch.arange(18.0).reshape(3, 6).masked_fill(mask == 0, math.nan)
    got = adv.token_rewards(torch.tensor([2.0, -1.0, 7.0]), mask, kl, 0.1)
    want = [[0, -0.1, -0.2, 0, 2 - 0.4, 0], [0, 0, -0.8, -0.9, -1.0, -1 - 1.1], [0] * 6]
    torch.testing.assert_close(got, torch.tensor(want))
    plain = adv.token_rewards(torch.tensor([2.0, -1.0, 7.0]), mask, None, 0.1)
    assert plain.sum(1).tolist() == [2, -1, 0] and plain[0, 4] == 2 and plain[1, 5] == -1


def test_broadcast_gives_each_token_its_rows_value():
    mask = torch.tensor([[0.0, 1, 1], [0, 0, 1]])
    assert adv.broadcast(torch.tensor([2.0, -3.0]), mask).tolist() == [[0, 2, 2], [0, 0, -3]]


@given(lengths=st.lists(st.integers(0, 40), max_size=8), limit=st.integers(1, 30), cache=st.floats(0.1, 30))
def test_soft_overlong(lengths, limit, cache):
    got = soft_overlong(torch.tensor(lengths, dtype=torch.int64), limit, cache)
    for n, value in zip(lengths, got.tolist(), strict=True):
        free = limit - cache
        want = 0.0 if n <= free else (free - n) / cache if n <= limit else -1.0
        assert value == pytest.approx(want, abs=1e-6)


def test_dapos_numbers():
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert soft_overlong(lengths, 20480, 4096).tolist() == [0, 0, -0.5, -1, -1]
    finished = torch.tensor([True, True, True, False, False])
    shaped = shaped_rewards(
        torch.ones(5),
        lengths,
        finished,
        AlgorithmConfig(overlong=OverlongConfig(penalty=0.25, soft_fraction=0.2)),
        20480,
    )
    assert shaped.tolist() == [1, 1, 0.5, -0.25, -0.25]
    assert shaped_rewards(torch.ones(5), lengths, finished, AlgorithmConfig(), 20480).tolist() == [1] * 5
