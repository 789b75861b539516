import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops import advantages as adv


def group_loop(name, scores, group, valid):
    out = [0.0] * len(scores)
    for g in set(group):
        rows = [i for i in range(len(scores)) if group[i] == g and valid[i]]
        s = [scores[i] for i in rows]
        if len(s) < 2 or len(set(s)) == 1:
            continue
        for i in rows:
            others = [scores[j] for j in rows if j != i]
            out[i] = {
                "grpo": (scores[i] - statistics.fmean(s)) / (statistics.stdev(s) + 1e-6),
                "dr_grpo": scores[i] - statistics.fmean(s),
                "rloo": scores[i] - statistics.fmean(others),
            }[name]
    return out


rows = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 0.1, -2.5, 0.3, 1e3]), st.sampled_from([7, 8, 1000, 3]), st.booleans()),
    min_size=1,
    max_size=20,
)


@settings(max_examples=80, deadline=None)
@given(rows=rows)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_estimators(name, rows):
    scores, group, valid = map(list, zip(*rows, strict=True))
    s = torch.tensor(scores)
    want = group_loop(name, s.tolist(), group, valid)
    s[~torch.tensor(valid)] = math.nan
    got = getattr(adv, name)(s, torch.tensor(group), torch.tensor(valid))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-6, rtol=1e-5)
    assert all(float(g) == 0 for g, w in zip(got, want, strict=True) if w == 0)
    degenerate, total = adv.count_degenerate(s, torch.tensor(group), torch.tensor(valid))
    distinct = [len({x for x, h, v in rows if h == g and v}) for g in set(group)]
    assert (degenerate, total) == (sum(d < 2 for d in distinct), len(distinct))


def test_equal_scores_whose_mean_rounds_are_still_degenerate():
    scores, group, valid = torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3).long(), torch.ones(3).bool()
    for f in (adv.grpo, adv.dr_grpo, adv.rloo):
        assert (f(scores, group, valid) == 0).all()


def test_group_mean_std():
    s = torch.tensor([1.0, 2.0, 4.0, 9.0, math.nan])
    mean, std, n = adv.group_mean_std(s, torch.tensor([5, 5, 5, 2, 2]), torch.tensor([True, True, True, True, False]))
    assert mean.tolist() == pytest.approx([7 / 3] * 3 + [9, 9])
    assert std.tolist() == pytest.approx([statistics.stdev([1, 2, 4])] * 3 + [0, 0])
    assert n.tolist() == [3, 3, 3, 1, 1]
    eps = adv.grpo(s, torch.tensor([5, 5, 5, 2, 2]), torch.tensor([True, True, True, True, False]), eps=1.0)
    assert float(eps[2]) == pytest.approx((4 - 7 / 3) / (statistics.stdev([1, 2, 4]) + 1))


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
def test_gae(b, t, gamma, lam, seed):
    g = torch.Generator().manual_seed(seed)
    r, v = torch.randn(b, t, generator=g), torch.randn(b, t, generator=g)
    m = (torch.rand(b, t, generator=g) < 0.6).float()
    want = gae_loop(r.tolist(), v.tolist(), m.tolist(), gamma, lam)
    dirty_r, dirty_v = r.masked_fill(m == 0, math.nan), v.masked_fill(m == 0, math.nan)
    a, returns = adv.gae(dirty_r, dirty_v, m, gamma, lam)
    torch.testing.assert_close(a.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns.double(), (want + v) * m, atol=1e-5, rtol=1e-5)


def test_gae_without_discount_is_return_to_go_less_value():
    r, v, m = torch.tensor([[0.0, 0, 0, 5, 0]]), torch.tensor([[9.0, 1, 2, 3, 9]]), torch.tensor([[0.0, 1, 1, 1, 0]])
    a, returns = adv.gae(r, v, m, 1.0, 1.0)
    assert a.tolist() == [[0, 4, 3, 2, 0]] and returns.tolist() == [[0, 5, 5, 5, 0]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.booleans(), ddof=st.sampled_from([0, 1]))
def test_whiten(seed, shift, ddof):
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


def test_token_rewards():
    mask = torch.tensor([[0.0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    kl = torch.arange(18.0).reshape(3, 6).masked_fill(mask == 0, math.nan)
    got = adv.token_rewards(torch.tensor([2.0, -1.0, 7.0]), mask, kl, 0.1)
    want = [[0, -0.1, -0.2, 0, 2 - 0.4, 0], [0, 0, -0.8, -0.9, -1.0, -1 - 1.1], [0] * 6]
    torch.testing.assert_close(got, torch.tensor(want))
    plain = adv.token_rewards(torch.tensor([2.0, -1.0, 7.0]), mask, None, 0.1)
    assert plain.sum(1).tolist() == [2, -1, 0] and plain[0, 4] == 2 and plain[1, 5] == -1


def test_broadcast():
    mask = torch.tensor([[0.0, 1, 1], [0, 0, 1]])
    assert adv.broadcast(torch.tensor([2.0, -3.0]), mask).tolist() == [[0, 2, 2], [0, 0, -3]]
