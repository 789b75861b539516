"""Policy, value, reward losses, aggregation."""

import math
from statistics import fmean, pvariance

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aligner.config.sections import algorithm
from aligner.config.sections.algorithm import AlgorithmConfig, CovConfig, DppoConfig, SapoConfig
from aligner.ops.rl.aggregate import AGGREGATIONS, aggregate, denominator
from aligner.ops.rl.kl import NOISE
from aligner.ops.rl.policy_loss import POLICY_LOSSES, ppo, reinforce
from aligner.ops.rl.reward_loss import bradley_terry, regression
from aligner.ops.rl.value_loss import clipped_value_loss, explained_variance, explained_variance_sums
from aligner.types import PolicyTargets, TrainBatch

number = st.floats(-4, 4, allow_nan=False)


def scalar_ppo(lp, old, a, lo, hi, c=0.0):
    r = math.exp(max(-20.0, min(20.0, lp - old)))
    loss = max(-a * r, -a * min(max(r, 1 - lo), 1 + hi))
    return min(loss, -a * c) if c and a < 0 else loss


@settings(max_examples=300, deadline=None)
@given(lp=number, old=number, a=number, lo=st.sampled_from([0.0, 0.2]), hi=st.sampled_from([0.2, 0.5]))
@pytest.mark.parametrize("c", [0.0, 3.0])
def test_ppo_clip_masks_say_where_the_gradient_is_zero(lp, old, a, lo, hi, c):
    x = torch.tensor([[lp]], requires_grad=True)
    term = ppo(x, torch.tensor([[old]]), torch.tensor([[a]]), lo, hi, c)
    r = math.exp(lp - old)
    assert float(term.ratio) == pytest.approx(r, rel=1e-4) and not term.ratio.requires_grad
    if min(abs(r - edge) for edge in (1 - lo, 1 + hi, c)) < 1e-3 or abs(a) < 1e-3:
        return  # kinks
    term.per_token.sum().backward()
    assert (float(x.grad) == 0) == bool(term.clipped_low | term.clipped_high)
    assert not (term.clipped_low & (r > 1)).any() and not (term.clipped_high & (r < 1)).any()


# --- every policy loss against a loop over rows and tokens, one float64 number at a time
#
# A loop gets one row: lists of logprobs (numbers with gradients), old, engine's, advantages, chosen. Whatever it treats
# as a constant it turns into a plain float.


def clamped(x):
    return torch.clamp(x, -20.0, 20.0)


def ppo_loop(lp, old, mu, a, chosen, cfg):
    out = []
    for t in range(len(lp)):
        r = torch.exp(clamped(lp[t] - old[t]))
        x = torch.maximum(-a[t] * r, -a[t] * torch.clamp(r, 1 - cfg.clip_low, 1 + cfg.clip_high))
        out.append(torch.clamp(x, max=-a[t] * cfg.dual_clip) if cfg.dual_clip and a[t] < 0 else x)
    return out


def gspo_loop(lp, old, mu, a, chosen, cfg):
    """With one advantage for the row this is GSPO's sequence objective itself, without the token form's trick."""
    s = torch.exp(sum(clamped(x - y) for x, y in zip(lp, old, strict=True)) / len(lp))
    loss = torch.maximum(-a[0] * s, -a[0] * torch.clamp(s, 1 - cfg.clip_low, 1 + cfg.clip_high))
    return [loss] * len(lp)


def gmpo_loop(lp, old, mu, a, chosen, cfg):
    s = (a[0] > 0) - (a[0] < 0)
    terms = [clamped(x - y) for x, y in zip(lp, old, strict=True)]
    kept = [s * torch.minimum(s * x, s * torch.clamp(x, -cfg.clip_low, cfg.clip_high)) for x in terms]
    return [-a[0] * torch.exp(sum(kept) / len(kept))] * len(lp)


def cispo_loop(lp, old, mu, a, chosen, cfg):
    weights = [
        min(math.exp(max(-20, min(20, float(x.detach()) - y))), cfg.ratio_cap) for x, y in zip(lp, old, strict=True)
    ]
    return [-w * x * y for w, x, y in zip(weights, a, lp, strict=True)]


def sapo_loop(lp, old, mu, a, chosen, cfg):
    out = []
    for t in range(len(lp)):
        tau = cfg.sapo.tau_pos if a[t] > 0 else cfg.sapo.tau_neg
        r = torch.exp(clamped(lp[t] - old[t]))
        out.append(-a[t] * 4 / tau / (1 + torch.exp(-tau * (r - 1))))
    return out


def dppo_loop(lp, old, mu, a, chosen, cfg):
    out = []
    for t in range(len(lp)):
        moved = math.exp(float(lp[t].detach())) - math.exp(mu[t])
        dropped = (a[t] > 0 and moved > cfg.dppo.limit) or (a[t] < 0 and moved < -cfg.dppo.limit)
        x = 0.0 if dropped else -a[t] * torch.exp(clamped(lp[t] - mu[t]))
        out.append(x + cfg.dppo.penalty * (lp[t] - mu[t]) ** 2)
    return out


def clip_cov_loop(lp, old, mu, a, chosen, cfg):
    return [0.0 * x if c else x for x, c in zip(ppo_loop(lp, old, mu, a, chosen, cfg), chosen, strict=True)]


def kl_cov_loop(lp, old, mu, a, chosen, cfg):
    d = [clamped(x - y) for x, y in zip(lp, old, strict=True)]
    held = [cfg.cov.kl_coef * x.abs() * c for x, c in zip(d, chosen, strict=True)]
    return [-y * torch.exp(x) + z for x, y, z in zip(d, a, held, strict=True)]


def reinforce_loop(lp, old, mu, a, chosen, cfg):
    return [-x * y for x, y in zip(a, lp, strict=True)]


BY_ROW = "seq_mean_token_mean"
POLICY_CASES = {
    "ppo": (ppo_loop, AlgorithmConfig(clip_low=0.1, clip_high=0.3)),
    "ppo dual": (ppo_loop, AlgorithmConfig(dual_clip=1.2)),
    "gspo": (gspo_loop, AlgorithmConfig(policy_loss="gspo", clip_low=0.05, clip_high=0.1, aggregation=BY_ROW)),
    "gmpo": (gmpo_loop, AlgorithmConfig(policy_loss="gmpo", clip_low=0.3, clip_high=0.2, aggregation=BY_ROW)),
    "cispo": (cispo_loop, AlgorithmConfig(policy_loss="cispo", ratio_cap=1.2)),
    "sapo": (sapo_loop, AlgorithmConfig(policy_loss="sapo", sapo=SapoConfig(1.5, 2.5), aggregation=BY_ROW)),
    "dppo": (dppo_loop, AlgorithmConfig(policy_loss="dppo", dppo=DppoConfig(0.1, 0.05))),
    "gpg": (reinforce_loop, AlgorithmConfig(policy_loss="gpg")),
    "reinforce": (reinforce_loop, AlgorithmConfig(policy_loss="reinforce")),
    "clip_cov": (clip_cov_loop, AlgorithmConfig(policy_loss="clip_cov")),
    "kl_cov": (kl_cov_loop, AlgorithmConfig(policy_loss="kl_cov", cov=CovConfig(kl_coef=0.7))),
}


def policy_case(seed, b=12, t=7):
    """(logprobs, batch): ratios on both sides of every bound, an empty row, a row of one token, advantages of rows."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(b, t, generator=g) < 0.6
    mask[0], mask[1] = False, torch.arange(t) == 2
    mask[-1, 0] = True
    old = -torch.rand(b, t, generator=g) * 3
    batch = TrainBatch(
        tokens=torch.zeros(b, t, dtype=torch.int64),
        lengths=torch.full((b,), t),
        loss_mask=mask.float(),
        payloads=[
            PolicyTargets(
                old_logprobs=old,
                rollout_logprobs=old + 0.1 * torch.randn(b, t, generator=g),
                advantages=torch.randn(b, 1, generator=g).expand(b, t).clone(),
                chosen=(torch.rand(b, t, generator=g) < 0.3).float(),
            )
        ],
    )
    return old + 0.4 * torch.randn(b, t, generator=g), batch


def policy_reference(loop, logprobs, batch, cfg):
    """(loss [B, T] with 0 outside of the mask, gradient of its sum) in float64."""
    x = logprobs.double().requires_grad_()
    loss = torch.zeros_like(x)
    for i in range(len(x)):
        at = batch.loss_mask[i].nonzero().flatten().tolist()
        targets = batch.of(PolicyTargets)
        fields = (targets.old_logprobs, targets.rollout_logprobs, targets.advantages, targets.chosen)
        rest = [[float(f[i, t]) for t in at] for f in fields]
        terms = loop([x[i, t] for t in at], *rest, cfg) if at else []
        for t, term in zip(at, terms, strict=True):
            loss = loss + torch.nn.functional.one_hot(torch.tensor(i * x.shape[1] + t), x.numel()).view_as(x) * term
    (grad,) = torch.autograd.grad(loss.sum(), x, allow_unused=True)
    return loss.detach(), grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICY_CASES)
def test_policy_losses_are_their_loops(name, seed):
    loop, cfg = POLICY_CASES[name]
    logprobs, batch = policy_case(seed)
    want, want_grad = policy_reference(loop, logprobs, batch, cfg)
    x = logprobs.clone().requires_grad_()
    term = POLICY_LOSSES[cfg.policy_loss](x, batch.of(PolicyTargets), batch.loss_mask, cfg, NOISE[torch.float32])
    on = batch.loss_mask.bool()
    loss = torch.where(on, term.per_token, 0.0)
    loss.sum().backward()
    torch.testing.assert_close(loss.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad.double(), want_grad, atol=1e-5, rtol=1e-4)
    # the ratio that is reported is of the policy now to before the update, and is 1 before the first one
    start = POLICY_LOSSES[cfg.policy_loss](
        batch.of(PolicyTargets).old_logprobs, batch.of(PolicyTargets), batch.loss_mask, cfg, NOISE[torch.float32]
    )
    torch.testing.assert_close(start.ratio[on], torch.ones_like(start.ratio[on]))
    assert not term.ratio.requires_grad
    if name not in ("gpg", "reinforce", "sapo", "kl_cov"):
        assert (term.clipped_low | term.clipped_high)[on].any(), "the case does not reach the bounds"


@pytest.mark.parametrize("name", POLICY_CASES)
def test_a_policy_loss_of_a_row_is_its_own(name):
    """Rows may be cut into micro-batches, and padding may hold anything finite."""
    _, cfg = POLICY_CASES[name]
    logprobs, batch = policy_case(7)
    on = batch.loss_mask.bool()

    def f(logprobs, batch, cfg, noise):
        return POLICY_LOSSES[cfg.policy_loss](logprobs, batch.of(PolicyTargets), batch.loss_mask, cfg, noise)

    whole = f(logprobs, batch, cfg, 1e-4).per_token
    parts = [f(logprobs[rows], batch.select(rows), cfg, 1e-4).per_token for rows in torch.arange(12).split(5)]
    torch.testing.assert_close(torch.cat(parts)[on], whole[on])
    other = f(torch.where(on, logprobs, 0.0), batch, cfg, 1e-4).per_token
    torch.testing.assert_close(other[on], whole[on])


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce", "kl_cov"])
def test_the_first_update_has_the_policy_gradient(name):
    """On-policy, each loss has the gradient of -A logprobs (gspo and gmpo: of its mean over the row's tokens)."""
    _, cfg = POLICY_CASES[name]
    _, batch = policy_case(3)
    targets = batch.of(PolicyTargets)
    targets.chosen.zero_()
    x, on = targets.old_logprobs.clone().requires_grad_(), batch.loss_mask
    term = POLICY_LOSSES[cfg.policy_loss](x, batch.of(PolicyTargets), batch.loss_mask, cfg, NOISE[torch.float32])
    (torch.where(on.bool(), term.per_token, 0.0) / on.sum(1, keepdim=True).clamp_min(1)).sum().backward()
    torch.testing.assert_close(x.grad, -targets.advantages * on / on.sum(1, keepdim=True).clamp_min(1))
    assert not (term.clipped_low | term.clipped_high).any()


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", "clip_cov", "kl_cov"])
def test_log_ratios_are_clamped_before_exp(name):
    _, cfg = POLICY_CASES[name]
    _, batch = policy_case(0, b=2, t=3)
    targets = batch.of(PolicyTargets)
    batch.loss_mask, targets.advantages = torch.ones(2, 3), torch.full((2, 3), -1.0)
    targets.rollout_logprobs = targets.old_logprobs
    for far in (500.0, -500.0):
        x = (targets.old_logprobs + far).requires_grad_()
        term = POLICY_LOSSES[cfg.policy_loss](x, batch.of(PolicyTargets), batch.loss_mask, cfg, NOISE[torch.float32])
        (grad,) = torch.autograd.grad(term.per_token.sum(), x)
        assert term.ratio.isfinite().all() and grad.isfinite().all()
        assert term.per_token.isfinite().all()


def test_every_policy_loss_can_be_configured_and_every_one_is_tested():
    assert set(POLICY_LOSSES) == set(algorithm.POLICY_LOSSES) == {cfg.policy_loss for _, cfg in POLICY_CASES.values()}
    lp, a = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(reinforce(lp, a).per_token, -a * lp)


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
@example(v=2.0**-52, old=0.125, ret=2.0**-52, clip=0.2)  # old + (v - old) is not v, but nothing is clipped
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
    assert bool(term.clipped) == (0 < clip < abs(v - old) and abs(near - ret) > abs(v - ret))


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
    assert stats["accuracy"].tolist() == [1, 0, 0.5] and stats["margin"].tolist() == [1, -5, 0]
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
