"""The table of preference losses against textbook formulas in loops of float64, its special cases, and its edges."""

import math

import pytest
import torch
from torch import Tensor

from aligner.config.sections.preference import BY_RANK, LOSSES, OF_MEANS, PreferenceConfig
from aligner.ops.kernels.concentration import log_square_sum
from aligner.ops.rl.by_rank import with_partners
from aligner.ops.rl.preference import (
    Labels,
    agreement,
    likelihood_weights,
    measure,
    pair_losses,
    phi,
    rewards,
    start_losses,
    terms,
    total,
)
from aligner.types import LabelTargets, TrainBatch

B, T = 5, 9
LN2 = math.log(2)


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Of two Bernoulli distributions."""
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def odds(x: Tensor) -> Tensor:
    p = torch.exp(x)
    return p / (1 - p)


def textbook(name: str, c: PreferenceConfig, d: tuple, mean: tuple, margin: float, gap: float) -> Tensor:
    """One pair: the log-ratios d and mean logprobs of chosen and rejected, float64 scalars."""
    b, e, half = c.beta, c.label_smoothing, 1 / (2 * c.beta)
    z = b * (d[0] - d[1]) - c.gamma - margin
    s, p = torch.sigmoid, torch.sigmoid(torch.tensor(c.rpo_scale * gap, dtype=torch.float64))
    if name == "alphapo":
        a = c.alphapo_alpha
        shaped = [(1 - torch.exp(-a * x)) / a for x in mean]
        return -log_sigmoid(b * (shaped[0] - shaped[1]) - c.gamma)
    table = {
        "sigmoid": lambda: -(1 - e) * log_sigmoid(z) - e * log_sigmoid(-z),
        "robust": lambda: (-(1 - e) * log_sigmoid(z) + e * log_sigmoid(-z)) / (1 - 2 * e),
        "hinge": lambda: torch.clamp(1 - z, min=0),
        "ipo": lambda: (d[0] - d[1] - half) ** 2,
        "exo_pair": lambda: kl(s(z), torch.tensor(1 - (e or 1e-3), dtype=torch.float64)),
        "nca_pair": lambda: -log_sigmoid(b * d[0]) - 0.5 * log_sigmoid(-b * d[0]) - 0.5 * log_sigmoid(-b * d[1]),
        "bco_pair": lambda: -log_sigmoid(b * d[0]) - log_sigmoid(-b * d[1]),
        "sppo_hard": lambda: (d[0] - half) ** 2 + (d[1] + half) ** 2,
        "apo_zero": lambda: 1 - s(b * d[0]) + s(b * d[1]),
        "apo_down": lambda: s(b * d[0]) + 1 - s(b * (d[0] - d[1])),
        "discopop": lambda: -log_sigmoid(z) * (1 - s(z / c.tau)) + torch.exp(-z) * s(z / c.tau),
        "orpo": lambda: -b * log_sigmoid(torch.log(odds(mean[0]) / odds(mean[1]))),
        "rpo_bwd_kl": lambda: kl(p, s(z)),
        "rpo_fwd_kl": lambda: kl(s(z), p),
        "rpo_sq": lambda: (b * (d[0] - d[1]) - c.rpo_scale * gap) ** 2,
    }
    return table[name]()


def textbook_phi(d: Tensor, c: PreferenceConfig) -> Tensor:
    a = c.f_alpha
    return {
        "reverse_kl": lambda: d,
        "forward_kl": lambda: 1 - torch.exp(-d),
        "js": lambda: LN2 + log_sigmoid(d),
        "alpha": lambda: (torch.exp((a - 1) * d) - 1) / (a - 1),
    }[c.f_divergence]()


def oracle(
    name: str, c: PreferenceConfig, logprobs: Tensor, ref: Tensor | None, mask: Tensor, labels: Tensor
) -> Tensor:
    """float64 [B], token by token."""
    results = []
    for pair in range(len(mask) // 2):
        rows = (2 * pair, 2 * pair + 1)
        count = [int(mask[r].sum()) for r in rows]
        d, mean = [], []
        for r, n in zip(rows, count, strict=True):
            ratio, own, seen = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
            for t in range(mask.shape[1]):
                if mask[r, t]:
                    seen += 1
                    weight = c.ld_alpha if seen > min(count) else 1.0
                    ratio = ratio + weight * (logprobs[r, t] - (0 if ref is None else ref[r, t]))
                    own = own + logprobs[r, t]
            mean_of = c.length == "mean" or (c.length == "auto" and name == "ipo")
            d.append(textbook_phi(ratio, c) / (n if mean_of else 1))
            mean.append(own / n)
        gap = float(labels[rows[0], 1] - labels[rows[1], 1])
        results.append(textbook(name, c, tuple(d), tuple(mean), float(labels[rows[0], 0]) if c.margin else 0.0, gap))
    return torch.stack(results)


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, reference, mask with holes, labels of B pairs of ragged lengths."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(2 * B, T, generator=g) < 0.6
    mask[:, 0], mask[:, -1] = False, True
    logprobs = -2 * torch.rand(2 * B, T, generator=g, dtype=torch.float64) - 0.05
    ref = logprobs + torch.randn(2 * B, T, generator=g, dtype=torch.float64)
    labels = torch.randn(2 * B, 3, generator=g, dtype=torch.float64)
    labels[1::2, 0] = labels[0::2, 0]
    return logprobs.to(dtype), ref.to(dtype), mask.float(), labels.to(dtype)


def config(name: str, **more) -> PreferenceConfig:
    return PreferenceConfig(**settings([name]) | {"loss": [name]} | more)


def settings(names: list[str]) -> dict:
    found: dict = {"nll_coef": 1.0} if "orpo" in names else {}
    return found | ({"reference": "none"} if set(names) <= set(OF_MEANS) else {})


def losses(c: PreferenceConfig, data: tuple, name: str | None = None) -> Tensor:
    logprobs, ref, mask, labels = data
    if c.by_rank:
        batch = TrainBatch(mask.long(), mask.sum(1), mask, [LabelTargets(labels, ref)])
        labels = with_partners(batch, logprobs.detach(), c, None)
    answers = measure(logprobs, None if c.reference == "none" else ref, mask, c.ld_alpha)
    return pair_losses(answers, Labels.of(labels, c), c)[name or c.loss[0]]


BY_PAIR = [name for name in LOSSES if name not in BY_RANK]
CASES = [
    *((name, {}) for name in BY_PAIR),
    *((name, {"length": "mean", "beta": 2.0}) for name in BY_PAIR),
    *((name, {"label_smoothing": 0.2}) for name in ("sigmoid", "robust", "exo_pair")),
    *((name, {"gamma": 0.7, "margin": True}) for name in ("sigmoid", "hinge", "exo_pair", "rpo_bwd_kl", "discopop")),
    *((name, {"ld_alpha": 0.4}) for name in ("sigmoid", "ipo", "apo_zero")),
    *(("sigmoid", {"f_divergence": f, "f_alpha": 0.3}) for f in ("forward_kl", "js", "alpha")),
    *((name, {"reference": "none"}) for name in ("sigmoid", "ipo", "hinge")),
    ("ipo", {"length": "sum"}),
    ("ipo", {"f_divergence": "js"}),
    ("alphapo", {"gamma": 0.5}),
    ("rpo_sq", {"rpo_scale": 3.0}),
]


@pytest.mark.parametrize("name, settings", CASES, ids=lambda x: str(x))
def test_each_row_and_its_gradient_are_the_textbook_s(name, settings):
    c, (logprobs, ref, mask, labels) = config(name, **settings), make()
    ref = None if c.reference == "none" else ref
    actual, wanted = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    each, truth = losses(c, (actual, ref, mask, labels)), oracle(name, c, wanted, ref, mask, labels)
    torch.testing.assert_close(each, truth, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(each.sum(), actual)[0], torch.autograd.grad(truth.sum(), wanted)[0], rtol=1e-9, atol=1e-9
    )
    short = losses(c, tuple(x if x is None else x.float() for x in (logprobs, ref, mask, labels)))
    torch.testing.assert_close(short.double(), truth.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in OF_MEANS])
def test_values_where_policy_and_reference_agree(name):
    known = {"hinge": 1, "ipo": 25, "exo_pair": 2.76123076, "nca_pair": 2 * LN2, "bco_pair": 2 * LN2, "sppo_hard": 50}
    known |= {"apo_zero": 1, "apo_down": 1, "discopop": 0.84657359, "sigmoid": LN2, "robust": LN2}
    known |= dict.fromkeys(BY_RANK, LN2)
    c, (logprobs, _, mask, labels) = config(name), make()
    labels[:, 1] = 0
    each = losses(c, (logprobs, logprobs, mask, labels))
    expected = start_losses(Labels.of(labels, c), c)[name]
    torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.full((B,), known.get(name, {"rpo_bwd_kl": 0.0, "rpo_fwd_kl": 0.0, "rpo_sq": 0.0}.get(name, -1.0)))
    torch.testing.assert_close(each, wanted.double(), rtol=1e-7, atol=1e-9)


def test_values_at_the_start_know_margins_and_rewards():
    data = make()
    for c in (config("sigmoid", margin=True, gamma=0.3), config("rpo_bwd_kl"), config("exo_pair", margin=True)):
        each = losses(c, (data[0], data[0], *data[2:]))
        torch.testing.assert_close(each, start_losses(Labels.of(data[3], c), c)[c.loss[0]])
    assert start_losses(Labels.of(data[3], config("orpo")), config("orpo")) == {}


@pytest.mark.parametrize("name", LOSSES)
def test_one_number_per_answer_makes_the_gradient(name):
    """The same on each of an answer's tokens, whatever the row; exactly 0 elsewhere."""
    c, (logprobs, ref, mask, labels) = config(name), make()
    logprobs.requires_grad_()
    grad = torch.autograd.grad(losses(c, (logprobs, ref, mask, labels)).sum(), logprobs)[0]
    assert not grad[mask == 0].any()
    for row, on in zip(grad, mask.bool(), strict=True):
        torch.testing.assert_close(row[on], row[on][:1].expand(int(on.sum())))


def test_log_ratios_of_long_answers_keep_their_digits():
    """8,192 bfloat16 logprobs that differ by 1e-4 of a nat each: sums subtracted afterwards would lose all of it."""
    reference = torch.full((2, 8192), -2.0)
    logprobs = reference + 1e-4
    answers = measure(logprobs, reference, torch.ones(2, 8192))
    assert float(answers.chosen) == pytest.approx(0.8192, rel=2e-3)
    assert float(answers.chosen_mean) == pytest.approx(-1.9999, rel=1e-6)


# --- special cases: names elsewhere


def both(a: PreferenceConfig, b: PreferenceConfig, tolerance: float = 1e-6) -> None:
    """The same values in float32."""
    data = make(1, torch.float32)
    torch.testing.assert_close(losses(a, data), losses(b, data), rtol=tolerance, atol=tolerance)


def test_simpo_is_sigmoid_on_means_without_a_reference():
    logprobs, _, mask, labels = make(2, torch.float32)
    c = config("sigmoid", length="mean", reference="none", beta=2.0, gamma=1.0)
    mean = (logprobs * mask).sum(1) / mask.sum(1)
    wanted = -torch.nn.functional.logsigmoid(2.0 * (mean[0::2] - mean[1::2]) - 1.0)
    torch.testing.assert_close(losses(c, (logprobs, None, mask, labels)), wanted, rtol=1e-6, atol=1e-6)
    # alphapo with alpha 0 is SimPO, and its small alphas come near it
    both(c, config("alphapo", beta=2.0, gamma=1.0, alphapo_alpha=0.0))
    both(c, config("alphapo", beta=2.0, gamma=1.0, alphapo_alpha=1e-4), 1e-3)


def test_neutral_settings_are_plain_dpo():
    plain = config("sigmoid")
    for settings in ({"f_divergence": "alpha", "f_alpha": 1.0}, {"ld_alpha": 1.0}, {"gamma": 0.0}):
        both(plain, config("sigmoid", **settings))
    both(plain, config("robust"))
    both(config("sigmoid", f_divergence="alpha", f_alpha=1.0001), plain, 1e-2)  # the limit, from outside


def test_ld_alpha_of_0_cuts_both_answers_to_the_shorter():
    logprobs, ref, mask, labels = make(3)
    cut = mask.clone()
    for pair in range(B):
        n = int(mask[2 * pair : 2 * pair + 2].sum(1).min())
        for row in (2 * pair, 2 * pair + 1):
            cut[row, mask[row].nonzero().flatten()[n:]] = 0
    c = config("sigmoid", ld_alpha=0.0)
    torch.testing.assert_close(losses(c, (logprobs, ref, mask, labels)), losses(c, (logprobs, ref, cut, labels)))
    mean = config("sigmoid", ld_alpha=0.0, length="mean")  # n stays that of the whole answer
    assert not torch.allclose(losses(mean, (logprobs, ref, mask, labels)), losses(mean, (logprobs, ref, cut, labels)))


def test_rpo_is_cdpo_and_exo_by_pair_and_dpo_in_the_limit():
    logprobs, ref, mask, labels = make(4)
    labels[0::2, 1], labels[1::2, 1] = math.log(9), 0.0  # sigmoid(ln 9) = 0.9
    data = (logprobs, ref, mask, labels)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    smooth = losses(config("sigmoid", label_smoothing=0.1), data) - entropy
    torch.testing.assert_close(losses(config("rpo_bwd_kl"), data), smooth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        losses(config("rpo_fwd_kl"), data), losses(config("exo_pair", label_smoothing=0.1), data)
    )
    far = losses(config("rpo_bwd_kl", rpo_scale=1e3), data)
    torch.testing.assert_close(far, losses(config("sigmoid"), data), rtol=1e-6, atol=1e-6)
    # ipo is rpo_sq with rpo_scale * gap = 1/2, over beta squared
    labels[0::2, 1] = 0.5
    sq = losses(config("rpo_sq", length="mean"), data) / 0.1**2
    torch.testing.assert_close(sq, losses(config("ipo"), data), rtol=1e-6, atol=1e-6)


def test_apo_and_bco_are_sums_over_the_two_answers():
    data = make(5)
    t = terms(measure(*data[:3]), Labels.of(data[3], config("apo_zero")), "apo_zero", config("apo_zero"))
    # unpaired with z0 = 0, desirable and undesirable
    unpaired = (1 - torch.sigmoid(0.1 * t.chosen)) + (1 - torch.sigmoid(-0.1 * t.rejected))
    torch.testing.assert_close(losses(config("apo_zero"), data), unpaired)
    bco = -log_sigmoid(0.1 * t.chosen) - log_sigmoid(-0.1 * t.rejected)
    torch.testing.assert_close(losses(config("bco_pair"), data), bco)


def test_bradley_terry_is_sigmoid_with_beta_1():
    from aligner.ops.rl.reward_loss import bradley_terry

    data = make(6)
    a = measure(*data[:3])
    wanted = bradley_terry(a.chosen, a.rejected, data[3][0::2, 0], 0.0)[0]
    torch.testing.assert_close(losses(config("sigmoid", beta=1.0, margin=True), data).float(), wanted)


def test_a_list_is_the_weighted_sum_of_its_rows():
    data = make(7)
    c = PreferenceConfig(loss=["sigmoid", "bco_pair"], weights=[0.8, 0.2], nll_coef=1.0)
    answers, labels = measure(*data[:3]), Labels.of(data[3], c)
    actual = total(pair_losses(answers, labels, c), c)
    torch.testing.assert_close(actual, 0.8 * losses(config("sigmoid"), data) + 0.2 * losses(config("bco_pair"), data))


def test_swapped_answers_turn_the_rewards_around():
    logprobs, ref, mask, labels = make(8)
    swap = torch.arange(2 * B).view(-1, 2).flip(1).flatten()
    c = config("sigmoid")
    there = rewards(measure(logprobs, ref, mask), Labels.of(labels, c), c)
    back = rewards(measure(logprobs[swap], ref[swap], mask[swap]), Labels.of(labels, c), c)
    torch.testing.assert_close(there, (back[1], back[0]))
    torch.testing.assert_close(agreement(*there), 1 - agreement(*back))
    assert agreement(torch.zeros(1), torch.zeros(1)) == 0.5


# --- edges


@pytest.mark.parametrize("x", [0.0, -0.0, -1e-12, -1e-9, -1e-3, -math.log(2), -1.0, -50.0, -300.0])
def test_orpo_is_finite_for_memorised_and_for_hopeless_answers(x):
    for rejected in (x, 0.0, -1e-12, -50.0):
        logprobs = torch.tensor([[x], [rejected]], requires_grad=True)
        each = losses(config("orpo"), (logprobs, None, torch.ones(2, 1), torch.zeros(2, 3)))
        each.sum().backward()
        assert torch.isfinite(each).all() and torch.isfinite(logprobs.grad).all(), (x, rejected)
        exact = [min(v, -1e-6) for v in (x, rejected)]
        log_odds = [v - math.log(-math.expm1(v)) for v in exact]
        gap = log_odds[1] - log_odds[0]
        wanted = 0.1 * (max(gap, 0) + math.log1p(math.exp(-abs(gap))))
        assert float(each.detach()) == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [9000.0, -9000.0])
def test_log_ratios_out_of_all_bounds_give_finite_numbers(name, size):
    for settings in [{}, *[{"f_divergence": f} for f in ("forward_kl", "js", "alpha") if name == "sigmoid"]]:
        logprobs = torch.tensor([[-10.0 + min(size, 0)], [-10.0 - max(size, 0)]], requires_grad=True)
        data = (logprobs, torch.full((2, 1), -10.0), torch.ones(2, 1), torch.zeros(2, 3))
        each = losses(config(name, **settings), data)
        each.sum().backward()
        assert torch.isfinite(each).all() and torch.isfinite(logprobs.grad).all(), (settings, each)


def test_discopop_at_minus_900_is_the_logistic_loss():
    c = config("discopop", beta=1.0)
    data = (torch.tensor([[-900.0], [-1.0]]), torch.tensor([[-1.0], [-1.0]]), torch.ones(2, 1), torch.zeros(2, 3))
    assert float(losses(c, data)) == pytest.approx(899.0)


def test_what_is_not_in_the_mask_does_not_matter():
    logprobs, ref, mask, labels = make(9)
    dirty = torch.where(mask.bool(), ref, torch.nan), torch.where(mask.bool(), logprobs, -torch.inf)
    for name in LOSSES:
        c = config(name)
        torch.testing.assert_close(
            losses(c, (dirty[1], dirty[0], mask, labels)), losses(c, (logprobs, ref, mask, labels))
        )


def test_the_divergences_have_their_slopes_at_0():
    d = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    for f, slope in {"reverse_kl": 1.0, "forward_kl": 1.0, "js": 0.5, "alpha": 1.0}.items():
        value = phi(d, config("sigmoid", f_divergence=f))
        grad = torch.autograd.grad(value.sum(), d)[0]
        assert float(value[4].detach()) == pytest.approx(0, abs=1e-12) and float(grad[4]) == pytest.approx(slope)
        assert (grad > 0).all()  # a larger log-ratio is always more


# --- WPO


def test_likelihood_weights_are_products_of_geometric_means():
    logprobs, _, mask, _ = make(10)
    squares = -torch.rand(2 * B, T, dtype=torch.float64)
    actual = likelihood_weights(logprobs.requires_grad_(), squares, mask)
    assert not actual.requires_grad
    for pair in range(B):
        wanted = 1.0
        for row in (2 * pair, 2 * pair + 1):
            on = mask[row].bool()
            wanted *= math.exp(float((logprobs[row] - squares[row])[on].mean()))
        assert float(actual[pair]) == pytest.approx(wanted)


def test_log_square_sum_is_the_chance_of_two_equal_draws():
    logits = 3 * torch.randn(6, 11, dtype=torch.float64)
    p = torch.softmax(logits[:, :9] / 0.7, -1)
    actual = log_square_sum(logits, temperature=0.7, vocab_size=9)
    torch.testing.assert_close(actual, p.square().sum(-1).log())
    assert float(log_square_sum(torch.zeros(1, 8), vocab_size=8).exp()) == pytest.approx(1 / 8)
