"""Policy, value, reward losses, aggregation, mismatch."""

import math
from statistics import fmean, pvariance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.schema import AlgorithmConfig
from aligner.ops.aggregate import AGGREGATIONS, aggregate, denominator
from aligner.ops.mismatch import mismatch_sums
from aligner.ops.policy_loss import POLICY_LOSSES, ppo, reinforce
from aligner.ops.reward_loss import bradley_terry, regression
from aligner.ops.value_loss import clipped_value_loss, explained_variance, explained_variance_sums


def scalar_ppo(lp, old, a, lo, hi, c):
    r = math.exp(max(-20.0, min(20.0, lp - old)))
    loss = max(-a * r, -a * min(max(r, 1 - lo), 1 + hi))
    return min(loss, -a * c) if c and a < 0 else loss


number = st.floats(-4, 4, allow_nan=False)


@settings(max_examples=300, deadline=None)
@given(lp=number, old=number, a=number, lo=st.sampled_from([0.0, 0.2]), hi=st.sampled_from([0.2, 0.5]))
@pytest.mark.parametrize("c", [0.0, 3.0])
def test_ppo_value_gradient_and_clip_masks(lp, old, a, lo, hi, c):
    x = torch.tensor([[lp]], requires_grad=True)
    term = ppo(x, torch.tensor([[old]]), torch.tensor([[a]]), lo, hi, c)
    r = math.exp(lp - old)
    assert float(term.per_token.detach()) == pytest.approx(scalar_ppo(lp, old, a, lo, hi, c), rel=1e-4, abs=1e-5)
    assert float(term.ratio) == pytest.approx(r, rel=1e-4) and not term.ratio.requires_grad
    if min(abs(r - edge) for edge in (1 - lo, 1 + hi, c)) < 1e-3 or abs(a) < 1e-3:
        return  # kinks
    term.per_token.sum().backward()
    e = 1e-6
    slope = (scalar_ppo(lp + e, old, a, lo, hi, c) - scalar_ppo(lp - e, old, a, lo, hi, c)) / (2 * e)
    assert float(x.grad) == pytest.approx(slope, rel=1e-3, abs=1e-4)
    # what the masks say is what the gradient does
    assert (float(x.grad) == 0) == bool(term.clipped_low | term.clipped_high)
    assert not (term.clipped_low & (r > 1)).any() and not (term.clipped_high & (r < 1)).any()


def test_first_update_has_the_policy_gradient():
    lp = torch.randn(2, 5, requires_grad=True)
    a = torch.randn(2, 5)
    term = ppo(lp, lp.detach(), a, 0.2, 0.2, 0.0)
    term.per_token.sum().backward()
    torch.testing.assert_close(lp.grad, -a)
    assert not (term.clipped_low | term.clipped_high).any()


def test_log_ratio_is_clamped_before_exp():
    term = ppo(torch.tensor([[500.0, -500.0]]), torch.zeros(1, 2), torch.full((1, 2), -1.0), 0.2, 0.2, 0.0)
    assert term.ratio.tolist()[0] == pytest.approx([math.exp(20), math.exp(-20)])
    assert term.per_token.isfinite().all()


def test_policy_losses_take_their_numbers_from_the_config():
    cfg = AlgorithmConfig(clip_low=0.1, clip_high=0.4, dual_clip=2.0)
    lp, old, a = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4), torch.randn(3, 4)
    got = POLICY_LOSSES["ppo"](lp, old, a, cfg)
    for ours, direct in zip(got, ppo(lp, old, a, 0.1, 0.4, 2.0), strict=True):
        assert torch.equal(ours, direct)
    term = POLICY_LOSSES["reinforce"](lp, old, a, cfg)
    assert torch.equal(term.per_token, -a * lp) and torch.equal(term.per_token, reinforce(lp, a).per_token)
    torch.testing.assert_close(term.ratio, (lp - old).exp().detach())
    (grad,) = torch.autograd.grad(term.per_token.sum(), lp)
    assert torch.equal(grad, -a)
    for name in POLICY_LOSSES:
        AlgorithmConfig(policy_loss=name)  # every loss can be configured


def aggregate_loop(x, m, kind, length):
    rows = [[v for v, on in zip(xs, ms, strict=True) if on] for xs, ms in zip(x, m, strict=True)]
    rows = [r for r in rows if r]
    if not rows:
        return 0.0
    return {
        "token_mean": lambda: fmean([v for r in rows for v in r]),
        "seq_mean_token_mean": lambda: fmean([fmean(r) for r in rows]),
        "seq_mean_token_sum": lambda: fmean([sum(r) for r in rows]),
        "seq_mean_token_sum_norm": lambda: fmean([sum(r) / length for r in rows]),
    }[kind]()


@settings(max_examples=60, deadline=None)
@given(b=st.integers(1, 6), t=st.integers(1, 6), density=st.floats(0, 1), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregate_and_any_cut_into_micro_batches(kind, b, t, density, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, t, generator=g)
    m = (torch.rand(b, t, generator=g) < density).float()
    want = aggregate_loop(x.tolist(), m.tolist(), kind, 17)
    x = x.masked_fill(m == 0, math.inf).requires_grad_()
    total = denominator(m, kind, 17)
    whole = aggregate(x, m, kind, total)
    assert float(whole.detach()) == pytest.approx(want, rel=1e-4, abs=1e-5)
    (full,) = torch.autograd.grad(whole, x)
    assert (full[m == 0] == 0).all()
    cut = seed % (b + 1)
    halves = aggregate(x[:cut], m[:cut], kind, total) + aggregate(x[cut:], m[cut:], kind, total)
    assert float(halves.detach()) == pytest.approx(want, rel=1e-4, abs=1e-5)
    (parts,) = torch.autograd.grad(halves, x)
    torch.testing.assert_close(parts, full)


def test_constant_length_is_required_for_its_kind():
    with pytest.raises(AssertionError, match="length"):
        denominator(torch.ones(1, 2), "seq_mean_token_sum_norm")


@settings(max_examples=200, deadline=None)
@given(v=number, old=number, ret=number, clip=st.sampled_from([0.0, 0.2, 1.0]))
def test_value_loss(v, old, ret, clip):
    def exact(v):
        near = old + max(-clip, min(clip, v - old)) if clip else v
        return 0.5 * max((v - ret) ** 2, (near - ret) ** 2)

    x = torch.tensor([[v]], requires_grad=True)
    term = clipped_value_loss(x, torch.tensor([[old]]), torch.tensor([[ret]]), clip)
    assert float(term.per_token.detach()) == pytest.approx(exact(v), rel=1e-3, abs=1e-5)
    near = old + max(-clip, min(clip, v - old)) if clip else v
    if abs(abs(v - old) - clip) < 1e-3 or (near != v and abs(abs(v - ret) - abs(near - ret)) < 1e-3):
        return  # kinks
    term.per_token.sum().backward()
    assert float(x.grad) == pytest.approx((exact(v + 1e-6) - exact(v - 1e-6)) / 2e-6, rel=1e-3, abs=1e-3)
    assert bool(term.clipped) == (near != v and abs(near - ret) > abs(v - ret))


def test_explained_variance():
    g = torch.Generator().manual_seed(0)
    r, v = torch.randn(4, 6, generator=g) + 50, torch.randn(4, 6, generator=g) * 0.1
    m = torch.rand(4, 6, generator=g) < 0.5
    v = v + r * 0.5
    sums = explained_variance_sums(v[:2], r[:2], m[:2]) + explained_variance_sums(v[2:], r[2:], m[2:])
    errors, returns = (r - v)[m].tolist(), r[m].tolist()
    assert explained_variance(sums) == pytest.approx(1 - pvariance(errors) / pvariance(returns), rel=1e-4)
    ones = torch.ones(2, 2)
    assert explained_variance(explained_variance_sums(r[:2], r[:2], m[:2])) == 1
    assert explained_variance(explained_variance_sums(v[:2, :2], ones * 0.1, ones)) == 0  # constant returns
    assert explained_variance(explained_variance_sums(ones, ones, ones * 0)) == 0


def test_bradley_terry():
    chosen = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    rejected = torch.tensor([0.0, 3.0, 0.5], dtype=torch.float64)
    margin = torch.tensor([0.5, 0.0, 1.0])
    loss, stats = bradley_terry(chosen, rejected, margin, 0.01)
    for i in range(3):
        d = float(chosen[i] - rejected[i] - margin[i])
        want = math.log1p(math.exp(-d)) + 0.01 * float(chosen[i] + rejected[i]) ** 2
        assert float(loss[i]) == pytest.approx(want, rel=1e-6)
    assert stats["accuracy"].tolist() == [1, 0, 0] and stats["margin"].tolist() == [1, -5, 0]
    assert stats["chosen_mean"].tolist() == chosen.tolist() and stats["rejected_mean"].tolist() == rejected.tolist()
    same, _ = bradley_terry(chosen, chosen, None, 0.0)
    assert same.tolist() == pytest.approx([math.log(2)] * 3)


def test_bradley_terry_gradient_and_extremes():
    c, r = torch.tensor([0.3, 200.0, -200.0], requires_grad=True), torch.tensor([0.1, -200.0, 200.0])
    loss, stats = bradley_terry(c, r, None, 0.5)
    loss.sum().backward()
    d = (c - r).detach()
    torch.testing.assert_close(c.grad, -torch.sigmoid(-d) + 1.0 * (c.detach() + r))
    assert loss.isfinite().all() and not any(s.requires_grad for s in stats.values())


def test_regression_ignores_missing_targets():
    pred = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    target = torch.tensor([[0.0, math.nan], [1.0, 1.0], [math.nan, math.nan]])
    loss = regression(pred, target)
    assert loss.tolist() == pytest.approx([1.0, (4 + 9) / 2, 0.0])
    loss.sum().backward()
    assert pred.grad.tolist() == [[2, 0], [2, 3], [0, 0]]


def test_mismatch():
    g = torch.Generator().manual_seed(3)
    old, mu = -torch.rand(3, 5, generator=g), -torch.rand(3, 5, generator=g)
    m = (torch.rand(3, 5, generator=g) < 0.6).float()
    lr = [float(o) - float(u) for o, u, on in zip(old.flatten(), mu.flatten(), m.flatten(), strict=True) if on]
    means, maxima = mismatch_sums(old.masked_fill(m == 0, math.nan), mu, m)
    got = {name: float(a / b) for name, (a, b) in means.items()}
    assert got == pytest.approx(
        {
            "mismatch/token_mult_prob_error": fmean(math.exp(abs(x)) for x in lr),
            "mismatch/logprob_abs_mean": fmean(abs(x) for x in lr),
            "mismatch/gen_kl": fmean(math.exp(x) - 1 - x for x in lr),
        },
        rel=1e-5,
    )
    assert {k: float(v) for k, v in maxima.items()} == pytest.approx(
        {"mismatch/logprob_abs_max": max(abs(x) for x in lr)}
    )
    means, _ = mismatch_sums(old, old, m)
    assert float(means["mismatch/token_mult_prob_error"][0]) == m.sum() and float(means["mismatch/gen_kl"][0]) == 0
