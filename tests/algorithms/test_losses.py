"""The minibatch losses against loops in float64, and their independence of how a minibatch is cut."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from aligner.algorithms.anchor import Anchor
from aligner.algorithms.losses import policy_loss
from aligner.config.sections.algorithm import AlgorithmConfig, CovConfig, KLConfig, PositiveConfig, RewardLossConfig
from aligner.config.sections.mismatch import MismatchConfig
from aligner.ops.rl.covariance import choose_random, choose_top, covariance, token_keys
from aligner.ops.rl.policy_term import interpolated_logprobs
from aligner.roles.policy import TokenOutputs
from aligner.stages.ppo import value_loss
from aligner.stages.rm import attribute_loss, preference_loss
from aligner.stages.sft import sft_loss
from aligner.types import LabelTargets, PolicyTargets, SourceNumbers, TrainBatch, ValueTargets

pytestmark = pytest.mark.usefixtures("world")

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
LIMIT = 9  # response tokens, the constant of seq_mean_token_sum_norm
B, T = 6, 8


class Ranks:
    """Stands in for a process group of n data-parallel ranks where a loss only asks for its size."""

    def __init__(self, n: int = 1):
        self.n = n

    def size(self) -> int:
        return self.n


def make_batch(seed: int = 0) -> TrainBatch:
    """Ragged masks with holes; row 3 has no token at all; log ratios wide enough to clip on both sides."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, T + 1, (B,), generator=g)
    mask = (torch.arange(T)[None] < lengths[:, None]) & (torch.rand(B, T, generator=g) < 0.7)
    mask[:, 0], mask[3] = False, False

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(B, T, generator=g)

    old = -torch.rand(B, T, generator=g) * 3
    return TrainBatch(
        tokens=torch.randint(0, 9, (B, T), generator=g),
        lengths=lengths,
        loss_mask=mask.float(),
        payloads=[
            PolicyTargets(
                ref_logprobs=old + noise(0.3),
                advantages=noise(1.0),
                old_logprobs=old,
                rollout_logprobs=old + noise(0.1),
                row_keys=torch.arange(B) * 7,
            ),
            ValueTargets(returns=noise(1.0), values=noise(1.0)),
        ],
    )


def outputs(batch: TrainBatch, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropy) with gradients."""
    g = torch.Generator().manual_seed(seed)
    logprobs = (batch.of(PolicyTargets).old_logprobs + 0.4 * torch.randn(B, T, generator=g)).requires_grad_()
    return logprobs, torch.rand(B, T, generator=g).requires_grad_()


def looped(batch: TrainBatch, cfg: AlgorithmConfig, logprobs, entropy, kl_coef: float) -> torch.Tensor:
    """The same objective, one float64 number at a time."""
    rows, likely = [], []
    for i in range(B):
        terms = []
        for t in range(T):
            if not batch.loss_mask[i, t]:
                continue
            lp, a = logprobs[i, t], batch.of(PolicyTargets).advantages[i, t].double()
            old, ref = (
                batch.of(PolicyTargets).old_logprobs[i, t].double(),
                batch.of(PolicyTargets).ref_logprobs[i, t].double(),
            )
            r = torch.exp(lp - old)
            if cfg.policy_loss == "reinforce":
                x = -a * lp
            else:
                x = torch.maximum(-a * r, -a * torch.clamp(r, 1 - cfg.clip_low, 1 + cfg.clip_high))
                if cfg.dual_clip and a < 0:
                    x = torch.minimum(x, -a * cfg.dual_clip)
            if cfg.kl.placement == "loss":
                d = lp - ref
                kl = {
                    "k1": d,
                    "k2": d * d / 2,
                    "k3": torch.exp(-d) - 1 + d,
                    "abs": d.abs(),
                    "k3+": (torch.exp(-d) - 1 + d).detach() + d * d / 2 - (d * d / 2).detach(),
                }[cfg.kl.estimator]
                x = x + kl_coef * (kl * r if cfg.kl.importance_weighted else kl)
            terms.append(x - cfg.entropy_coef * entropy[i, t])
            if i in POSITIVE:
                likely.append(-lp)
        if terms:
            rows.append(terms)
    tokens = list(itertools.chain.from_iterable(rows))
    good = cfg.positive.coef * sum(likely) / len(likely)
    if cfg.observation_coef:
        read = [[-logprobs[i, t] for t in range(T) if OBSERVED[i, t]] for i in range(B)]
        every, some = list(itertools.chain.from_iterable(read)), [row for row in read if row]
        good = (
            good
            + cfg.observation_coef
            * {
                "token_mean": lambda: sum(every) / len(every),
                "seq_mean_token_mean": lambda: sum(sum(row) / len(row) for row in some) / len(some),
                "seq_mean_token_sum": lambda: sum(every) / len(some),
                "seq_mean_token_sum_norm": lambda: sum(every) / len(some) / LIMIT,
            }[cfg.aggregation]()
        )
    if cfg.aggregation == "token_mean":
        return good + sum(tokens) / len(tokens)
    if cfg.aggregation == "seq_mean_token_mean":
        return good + sum(sum(row) / len(row) for row in rows) / len(rows)
    return good + sum(tokens) / len(rows) / (LIMIT if cfg.aggregation.endswith("norm") else 1)


CASES = {
    "plain": AlgorithmConfig(),
    "reinforce": AlgorithmConfig(policy_loss="reinforce"),
    "clip-higher, dual clip": AlgorithmConfig(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
    "entropy": AlgorithmConfig(entropy_coef=0.3),
    "kl in the reward stays out of the loss": AlgorithmConfig(kl=KLConfig(0.5, "k3", "reward")),
    **{f"kl {kind}": AlgorithmConfig(kl=KLConfig(0.5, kind, "loss")) for kind in ("k1", "k2", "k3", "abs", "k3+")},
    "positive": AlgorithmConfig(positive=PositiveConfig(0.1)),
    "observations": AlgorithmConfig(observation_coef=0.3),
    "kl weighted": AlgorithmConfig(kl=KLConfig(0.5, "k3", "loss", importance_weighted=True), entropy_coef=0.1),
}


POSITIVE = (0, 3, 4)  # rows; of row 3 no token counts
OBSERVED = torch.rand(B, T, generator=torch.Generator().manual_seed(6)) * (torch.arange(B) != 1)[:, None] > 0.7


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
def test_policy_loss_is_the_loop(name, aggregation):
    cfg, batch = CASES[name], make_batch()
    cfg.aggregation = aggregation
    if cfg.positive.coef:
        batch.of(PolicyTargets).positive = torch.tensor([float(i in POSITIVE) for i in range(B)])
    if cfg.observation_coef:
        batch.of(PolicyTargets).observed = OBSERVED.float()
    logprobs, entropy = outputs(batch)
    out = policy_loss(batch, cfg, 0.5, LIMIT, dist.group.WORLD)(TokenOutputs(logprobs, entropy, None), batch)
    exact = [x.detach().double().requires_grad_() for x in (logprobs, entropy)]
    wanted = looped(batch, cfg, *exact, kl_coef=0.5)
    out.loss.backward()
    wanted.backward()
    assert float(out.loss) == pytest.approx(float(wanted), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(logprobs.grad.double(), exact[0].grad, rtol=1e-4, atol=1e-7)
    entropy_grad = torch.zeros(B, T) if entropy.grad is None else entropy.grad
    exact_grad = torch.zeros(B, T).double() if exact[1].grad is None else exact[1].grad
    torch.testing.assert_close(entropy_grad.double(), exact_grad, rtol=1e-5, atol=1e-8)


COV = CovConfig(fraction=0.2, low=0.01, high=2.0, kl_coef=0.5)
OTHERS = {
    "gspo": AlgorithmConfig(policy_loss="gspo", clip_low=0.1, clip_high=0.1, aggregation="seq_mean_token_mean"),
    "gmpo": AlgorithmConfig(policy_loss="gmpo", clip_low=0.3, clip_high=0.3, aggregation="seq_mean_token_mean"),
    **{name: AlgorithmConfig(policy_loss=name) for name in ("cispo", "dppo")},
    **{name: AlgorithmConfig(policy_loss=name, cov=COV) for name in ("clip_cov", "kl_cov")},
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", OTHERS)
def test_cutting_a_minibatch_changes_no_policy_loss(name, size):
    """Also those that look at a whole row, or at the whole minibatch."""
    batch = make_batch()
    loss = policy_loss(batch, OTHERS[name], 0.0, LIMIT, dist.group.WORLD)
    results = []
    for parts in ([torch.arange(B)], torch.arange(B).split(size), [torch.tensor([4, 0, 5]), torch.tensor([3, 2, 1])]):
        logprobs, _ = outputs(batch)
        total = sum(loss(TokenOutputs(logprobs[rows], None, None), batch.select(rows)).loss for rows in parts)
        total.backward()
        results.append((total.detach(), logprobs.grad))
    assert results[0][1].abs().sum() > 0
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_once_for_the_minibatch(name):
    batch = make_batch()
    loss = policy_loss(batch, OTHERS[name], 0.0, LIMIT, dist.group.WORLD)
    cov, keys = (
        covariance(batch.of(PolicyTargets).advantages, batch.of(PolicyTargets).old_logprobs, batch.loss_mask),
        token_keys(batch.of(PolicyTargets).row_keys, T),
    )
    chosen = (
        choose_random(cov, batch.loss_mask, keys, COV.fraction, COV.low, COV.high)
        if name == "clip_cov"
        else choose_top(cov, batch.loss_mask, keys, COV.fraction)
    )
    assert chosen.sum() >= 2 and torch.equal(batch.of(PolicyTargets).chosen, chosen)
    logprobs, _ = outputs(batch)
    out = loss(TokenOutputs(logprobs, None, None), batch)
    assert [float(x) for x in out.means["policy/chosen_fraction"]] == [
        float(chosen.sum()),
        float(batch.loss_mask.sum()),
    ]
    out.loss.backward()
    if name == "clip_cov":
        assert (logprobs.grad[chosen.bool()] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_cutting_a_minibatch_changes_no_gradient(aggregation, size):
    """The denominators are the minibatch's: shares of micro-batches add up to the whole."""
    cfg, batch = CASES["kl weighted"], make_batch()
    cfg.aggregation = aggregation
    squared = value_loss(batch, 0.2, dist.group.WORLD)
    losses = {
        "policy": policy_loss(batch, cfg, 0.5, LIMIT, dist.group.WORLD),
        "sft": sft_loss(batch, dist.group.WORLD),
        "value": lambda out, b: squared(out.logprobs, b),
    }
    for name, loss in losses.items():
        results = []
        for parts in ([torch.arange(B)], torch.arange(B).split(size)):
            logprobs, entropy = outputs(batch)
            total = torch.zeros(())
            for rows in parts:
                total = total + loss(TokenOutputs(logprobs[rows], entropy[rows], None), batch.select(rows)).loss
            total.backward()
            results.append((total.detach(), logprobs.grad))
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7, msg=name)


def test_means_of_the_parts_are_the_mean_of_the_whole():
    batch = make_batch()
    logprobs, entropy = outputs(batch)
    loss = policy_loss(batch, AlgorithmConfig(), 0.0, LIMIT, dist.group.WORLD)
    on = batch.loss_mask.bool()
    ratio = torch.exp(logprobs - batch.of(PolicyTargets).old_logprobs).detach()
    wanted = {
        "policy/ratio_mean": ratio[on].mean(),
        "policy/entropy": entropy[on].mean(),
        "policy/approx_kl": (ratio - 1 - ratio.log())[on].mean(),
        "policy/clip_fraction_low": ((ratio < 0.8) & (batch.of(PolicyTargets).advantages < 0))[on].float().mean(),
        "policy/clip_fraction_high": ((ratio > 1.2) & (batch.of(PolicyTargets).advantages > 0))[on].float().mean(),
    }
    assert wanted["policy/clip_fraction_low"] > 0 and wanted["policy/clip_fraction_high"] > 0
    outs = [
        loss(TokenOutputs(logprobs[rows], entropy[rows], None), batch.select(rows)) for rows in torch.arange(B).split(2)
    ]
    for name, value in wanted.items():
        numerator, denominator = (sum(out.means[name][i] for out in outs) for i in (0, 1))
        assert float(numerator / denominator) == pytest.approx(float(value), rel=1e-5), name
    assert float(max(out.maxima["policy/ratio_max"] for out in outs)) == pytest.approx(float(ratio[on].max()), rel=1e-6)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("correction, cap", [("none", 0.0), ("tis_token", 1.02), ("tis_sequence", 1.1)])
@pytest.mark.parametrize("way, loss", [("engine", "ppo"), ("proxy", "ppo"), ("proxy", "reinforce"), ("auto", "ppo")])
def test_anchors_are_the_loop(way, loss, correction, cap, size):
    """Step from version 6, its third update (version 8); tokens of versions 3 to 6, some in the same row. Weights have
    no gradient, and neither has the anchor."""
    batch, g = make_batch(), torch.Generator().manual_seed(5)
    logprobs, _ = outputs(batch)
    targets = batch.of(PolicyTargets)
    targets.old_logprobs, targets.response_mask = None, batch.loss_mask
    targets.versions = torch.randint(3, 7, (B, T), generator=g)
    anchor = Anchor(way, MismatchConfig(correction, cap=cap), before=6, now=8)
    cfg = AlgorithmConfig(policy_loss=loss, clip_low=0.05, clip_high=0.1)
    actual = policy_loss(batch, cfg, 0.0, LIMIT, dist.group.WORLD, anchor)
    parts = torch.arange(B).split(size)
    sum(actual(TokenOutputs(logprobs[rows], None, None), batch.select(rows)).loss for rows in parts).backward()

    exact, terms = logprobs.detach().double().requires_grad_(), []
    for i in range(B):
        at = [t for t in range(T) if batch.loss_mask[i, t]]
        pi, mu = (x.detach().double() for x in (exact[i], batch.of(PolicyTargets).rollout_logprobs[i]))
        versions = batch.of(PolicyTargets).versions[i].double()
        share = {"auto": torch.ones(T), "engine": torch.zeros(T), "proxy": (6 - versions) / (8 - versions)}[way]
        old = mu + share * (pi - mu)
        ratios = (old - mu).exp()
        product = math.prod(float(ratios[t]) for t in at)
        for t in at:
            r, a = (exact[i, t] - old[t]).exp(), batch.of(PolicyTargets).advantages[i, t].double()
            x = -a * exact[i, t] if loss == "reinforce" else torch.max(-a * r, -a * r.clamp(0.95, 1.1))
            if way != "engine" and correction != "none":  # which is the ratio's own
                x = x * min(float(ratios[t]) if correction == "tis_token" else product, cap)
            terms.append(x)
    (sum(terms) / len(terms)).backward()
    torch.testing.assert_close(logprobs.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


def test_the_proxy_at_both_ends():
    """Of weights before the step it is the engine's; in the first update the policy's: bit by bit."""
    g = torch.Generator().manual_seed(0)
    pi, mu = (-3 * torch.rand(B, T, generator=g) for _ in range(2))
    assert torch.equal(interpolated_logprobs(pi, mu, torch.full((B, T), 6), 6, 7), mu)
    assert torch.equal(interpolated_logprobs(pi, mu, torch.randint(2, 7, (B, T), generator=g), 6, 6), pi)


def test_on_policy_the_surrogate_is_the_mean_advantage():
    batch = make_batch()
    out = TokenOutputs(batch.of(PolicyTargets).old_logprobs.clone(), None, None)
    value = policy_loss(batch, AlgorithmConfig(), 0.0, LIMIT, dist.group.WORLD)(out, batch)
    on = batch.loss_mask.bool()
    assert float(value.loss) == pytest.approx(-float(batch.of(PolicyTargets).advantages[on].mean()), rel=1e-5)
    assert "policy/entropy" not in value.means


def test_sft_loss_counts_masked_tokens_only():
    batch = make_batch()
    logprobs, _ = outputs(batch)
    hits = torch.ones(B, T)
    out = sft_loss(batch, dist.group.WORLD)(TokenOutputs(logprobs, None, hits), batch)
    on = batch.loss_mask.bool()
    assert float(out.loss) == pytest.approx(-float(logprobs[on].mean()), rel=1e-5)
    assert [float(x) for x in out.means["sft/token_accuracy"]] == [float(on.sum())] * 2
    out.loss.backward()
    assert (logprobs.grad[~on] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 6])
def test_losses_of_sources_add_up_to_the_loss(size):
    batch = make_batch()
    batch = batch.with_payloads(SourceNumbers(torch.tensor([0, 2, 0, 2, 2, 0])))
    logprobs, names = outputs(batch)[0].detach(), ["a", "none", "b"]
    loss = sft_loss(batch, dist.group.WORLD, "nll", names)
    parts = [loss(TokenOutputs(logprobs[i], None, None), batch.select(i)).means for i in torch.arange(B).split(size)]
    sums = {name: [float(sum(means[name][k] for means in parts)) for k in (0, 1)] for name in parts[0]}
    assert sums["sft/loss/none"] == [0.0, 0.0]  # written as null
    for name, rows in (("a", [0, 2, 5]), ("b", [1, 3, 4])):
        on = batch.loss_mask[rows].bool()
        assert sums[f"sft/loss/{name}"] == pytest.approx([-float(logprobs[rows][on].sum()), float(on.sum())])
    both = zip(sums["sft/loss/a"], sums["sft/loss/b"], strict=True)
    assert [a + b for a, b in both] == pytest.approx(sums["sft/loss"])


def test_dft_is_the_negative_probability_for_gradients():
    """As a float64 loop, for logits: weights have no gradient; tokens of probability 0 or 1 have none."""
    batch, g = make_batch(), torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, 9, generator=g, dtype=torch.float64)
    logits[0, 1:3] = torch.eye(9, dtype=torch.float64)[batch.tokens[0, 1:3]] * 200 * torch.tensor([[1], [-1]])
    batch.loss_mask[0, 1:3] = 1.0

    def tokens(free: torch.Tensor) -> torch.Tensor:
        return free.log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0]

    free, exact = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    out = sft_loss(batch, dist.group.WORLD, "dft")(TokenOutputs(tokens(free), None, None), batch)
    out.loss.backward()
    on = [(i, t) for i in range(B) for t in range(T) if batch.loss_mask[i, t]]
    sum(-tokens(exact)[at].exp() for at in on).div(len(on)).backward()
    torch.testing.assert_close(free.grad, exact.grad, rtol=1e-5, atol=1e-7)
    logprobs = tokens(logits)
    assert float(out.loss) == pytest.approx(float(sum(-logprobs[at].exp() * logprobs[at] for at in on) / len(on)))
    assert free.grad[0, 1:3].abs().max() < 1e-12 < free.grad.abs().max()
    nll, count = out.means["sft/loss"]  # comparable with another run's
    assert float(nll / count) == pytest.approx(float(sum(-logprobs[at] for at in on) / len(on)))


def test_value_loss_is_the_loop():
    batch = make_batch()
    values = (
        batch.of(ValueTargets).values + 0.5 * torch.randn(B, T, generator=torch.Generator().manual_seed(3))
    ).requires_grad_()
    out = value_loss(batch, 0.2, dist.group.WORLD)(values, batch)
    terms, clipped = [], 0
    for i, t in batch.loss_mask.nonzero().tolist():
        v, old, r = (float(x[i, t]) for x in (values, batch.of(ValueTargets).values, batch.of(ValueTargets).returns))
        plain, bounded = (v - r) ** 2, (min(max(v, old - 0.2), old + 0.2) - r) ** 2
        terms.append(0.5 * max(plain, bounded))
        clipped += bounded > plain
    assert float(out.loss) == pytest.approx(math.fsum(terms) / len(terms), rel=1e-5)
    assert float(out.means["critic/clip_fraction"][0]) == clipped > 0
    assert float(value_loss(batch, 0.0, dist.group.WORLD)(values, batch).means["critic/clip_fraction"][0]) == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_loss_is_aggregated_as_the_policy_loss(aggregation):
    batch = make_batch()
    squares = 0.5 * (batch.of(ValueTargets).values + 1 - batch.of(ValueTargets).returns) ** 2
    loss = value_loss(batch, 0.0, dist.group.WORLD, aggregation, LIMIT)
    rows = [squares[i][batch.loss_mask[i].bool()] for i in range(B) if batch.loss_mask[i].any()]
    wanted = {
        "token_mean": torch.cat(rows).mean(),
        "seq_mean_token_mean": sum(row.mean() for row in rows) / len(rows),
        "seq_mean_token_sum": torch.cat(rows).sum() / len(rows),
        "seq_mean_token_sum_norm": torch.cat(rows).sum() / len(rows) / LIMIT,
    }[aggregation]
    assert float(loss(batch.of(ValueTargets).values + 1, batch).loss) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("center", [0.0, 0.1])
def test_preference_loss_is_the_loop_over_any_number_of_ranks(margin, center):
    g = torch.Generator().manual_seed(0)
    pairs = 6
    scores = torch.randn(2 * pairs, 1, generator=g).requires_grad_()
    labels = torch.rand(pairs, generator=g).repeat_interleave(2)
    tokens, known = torch.zeros(2 * pairs, 1, dtype=torch.int64), [LabelTargets(labels)]
    batch = TrainBatch(tokens, torch.ones(2 * pairs), torch.ones(2 * pairs, 1), known)
    cfg = AlgorithmConfig(reward_loss=RewardLossConfig(center_coef=center, margin=margin))
    wanted = 0.0
    for i in range(pairs):
        c, r = float(scores[2 * i]), float(scores[2 * i + 1])
        wanted += math.log1p(math.exp(-(c - r - (float(labels[2 * i]) if margin else 0.0)))) + center * (c + r) ** 2
    wanted /= pairs
    for ranks in (1, 2, 3):
        total, grad = 0.0, torch.zeros_like(scores)
        for rows in torch.arange(2 * pairs).split(2 * pairs // ranks):
            loss = preference_loss(pairs // ranks, cfg, Ranks(ranks))
            for word in rows.split(2):  # micro-batches of one pair
                out = loss(scores[word], batch.select(word))
                total += float(out.loss)
                grad += torch.autograd.grad(out.loss, scores)[0]
        assert total == pytest.approx(wanted, rel=1e-5)
        first = grad if ranks == 1 else first  # noqa: F821
        torch.testing.assert_close(grad, first, rtol=1e-5, atol=1e-7)


def test_attribute_loss_leaves_out_what_is_not_known():
    scores = torch.tensor([[1.0, 2.0], [3.0, -1.0]], requires_grad=True)
    labels = torch.tensor([[0.0, 4.0], [float("nan"), 1.0]])
    batch = TrainBatch(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2), torch.ones(2, 1), [LabelTargets(labels)])
    out = attribute_loss(2, dist.group.WORLD)(scores, batch)
    assert float(out.loss) == pytest.approx(((1 + 4) / 2 + 4) / 2)
    out.loss.backward()
    torch.testing.assert_close(scores.grad, torch.tensor([[0.5, -1.0], [0.0, -2.0]]))


SIZES = {
    "kl_cov": AlgorithmConfig(policy_loss="kl_cov", cov=COV),
    "abs": AlgorithmConfig(kl=KLConfig(0.5, "abs", "loss")),
}


@pytest.mark.parametrize("dtype, noise", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("name", SIZES)
def test_rounding_before_the_first_update_does_not_turn_gradients(name, dtype, noise):
    """Old logprobs that another pass computed, in another layout, are as good as the update's own."""
    batch = make_batch()
    (logprobs, _), targets = outputs(batch), batch.of(PolicyTargets)
    results = []
    for seed in (None, 0, 1):
        targets.old_logprobs = logprobs.detach().clone()
        if seed is not None:
            targets.old_logprobs += noise * torch.randn(B, T, generator=torch.Generator().manual_seed(seed))
        targets.ref_logprobs, targets.chosen = targets.old_logprobs, None
        loss = policy_loss(batch, SIZES[name], 0.5, LIMIT, dist.group.WORLD, dtype=dtype)
        targets.chosen = None if targets.chosen is None else batch.loss_mask  # whoever is chosen
        value = loss(TokenOutputs(logprobs, None, None), batch).loss
        results.append(torch.autograd.grad(value, logprobs)[0])
    assert results[0].abs().sum() > 0.1
    for other in results[1:]:
        assert (other - results[0]).norm() < 3 * noise * results[0].norm()
