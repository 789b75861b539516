"""Pairwise preference losses: six numbers per pair, and one row of a table per loss.

With m the mask of an answer's tokens, n their number, and chosen c, rejected r:

    D_t = logprob_t - ref_logprob_t (no reference: logprob_t), built per token and then summed: sums of thousands of
          logprobs subtracted from each other would keep little of the difference
    d   = sum_t m_t D_t, tokens beyond the shorter answer's length times `ld_alpha` (arXiv:2409.06411)
    g   = phi(d), divided by n where the loss takes means; phi of `f_divergence` (arXiv:2309.16240):
          reverse_kl d | forward_kl 1 - e^-d | js ln 2 + logsigmoid(d) | alpha (e^((a - 1) d) - 1) / (a - 1)
    h   = g_c - g_r;  z = beta h - gamma - margin

Every row is a function of these and has no other state, so its gradient to an answer is one number per answer. The
rows aot and aot_unpaired are functions of all pairs of the minibatch; the values of other pairs are constants
(ops/rl/by_rank.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from aligner.config.sections.preference import OF_MEANS, PreferenceConfig

MOST = 80.0  # of an exponent: e^80 is still far from float32's largest number, and from any healthy log-ratio
SURE = -1e-6  # mean logprob of an answer that is as good as certain: odds beyond are not distinguished (orpo)


class PairLogprobs(NamedTuple):
    """Six numbers of each of B pairs, float32 [B]."""

    chosen: Tensor  # d
    rejected: Tensor
    chosen_tokens: Tensor  # n
    rejected_tokens: Tensor
    chosen_mean: Tensor  # of the policy's logprobs
    rejected_mean: Tensor


class Partners(NamedTuple):
    """Values of other pairs for the losses that sort, float32 [B]: `with_partners`."""

    shift: Tensor  # added to h, it makes the difference between policy and reference at one rank
    of_chosen: Tensor  # g of the rejected answer that has the chosen one's rank
    of_rejected: Tensor  # and the other way round


class Labels(NamedTuple):
    """Labels of each pair in the data, float32 [B]."""

    margin: Tensor
    gap: Tensor  # reward of the chosen answer less that of the rejected one
    weight: Tensor
    counts: Tensor  # 1; 0 for rows that are no pair, which are in no sum and no denominator
    partners: Partners | None = None

    @classmethod
    def of(cls, labels: Tensor, c: PreferenceConfig) -> Labels:
        """Make it of labels [2B, 3] of `collate_pairs`: margin, reward, weight of rows chosen, rejected, chosen, ...;
        [2B, 4] with `counts` where some are no pairs; [2B, 6] of `with_partners`."""
        margin = labels[0::2, 0] if c.margin else torch.zeros_like(labels[0::2, 0])
        counts = labels[0::2, 3] if labels.shape[1] > 3 else torch.ones_like(margin)
        partners = Partners(labels[0::2, 4], labels[0::2, 5], labels[1::2, 5]) if labels.shape[1] > 4 else None
        return cls(margin, labels[0::2, 1] - labels[1::2, 1], labels[0::2, 2], counts, partners)


class Terms(NamedTuple):
    """Arguments of a row of the table, float32 [B]."""

    chosen: Tensor  # g
    rejected: Tensor
    z: Tensor
    target: Tensor  # rpo_scale * gap
    chosen_mean: Tensor
    rejected_mean: Tensor
    partners: Partners | None

    @property
    def h(self) -> Tensor:
        return self.chosen - self.rejected


Row = Callable[[Terms, PreferenceConfig], Tensor]


def measure(logprobs: Tensor, reference: Tensor | None, mask: Tensor, ld_alpha: float = 1.0) -> PairLogprobs:
    """Sum logprobs, reference, mask [2B, T], rows chosen, rejected, chosen, ... Every row has a token in the mask."""
    on = mask.bool()
    logprobs = torch.where(on, logprobs, 0.0)
    ratios = logprobs if reference is None else torch.where(on, logprobs - reference.to(logprobs.dtype), 0.0)
    tokens = on.sum(1)
    if ld_alpha != 1:
        shorter = torch.minimum(tokens[0::2], tokens[1::2]).repeat_interleave(2)
        ratios = torch.where(on.cumsum(1) > shorter[:, None], ld_alpha * ratios, ratios)
    sums, means, tokens = ratios.sum(1), logprobs.sum(1) / tokens, tokens.to(logprobs.dtype)
    return PairLogprobs(sums[0::2], sums[1::2], tokens[0::2], tokens[1::2], means[0::2], means[1::2])


def phi(d: Tensor, c: PreferenceConfig) -> Tensor:
    """Return phi of the log-ratio by `f_divergence`; 0 at 0, with slope 1 (js: 1/2)."""
    if c.f_divergence == "forward_kl":
        return -torch.expm1((-d).clamp(max=MOST))
    if c.f_divergence == "js":
        return math.log(2) + logsigmoid(d)
    if c.f_divergence == "alpha" and c.f_alpha != 1:
        a = c.f_alpha - 1
        return torch.expm1((a * d).clamp(max=MOST)) / a
    return d


def terms(answers: PairLogprobs, labels: Labels, name: str, c: PreferenceConfig) -> Terms:
    """Return the arguments of the row `name`."""
    chosen, rejected = (phi(d, c) for d in answers[:2])
    if c.over_mean(name):
        chosen, rejected = chosen / answers.chosen_tokens, rejected / answers.rejected_tokens
    z = c.beta * (chosen - rejected) - c.gamma - labels.margin
    means = answers.chosen_mean, answers.rejected_mean
    return Terms(chosen, rejected, z, c.rpo_scale * labels.gap, *means, labels.partners)


def pair_losses(answers: PairLogprobs, labels: Labels, c: PreferenceConfig) -> dict[str, Tensor]:
    """Return each entry of `c.loss` -> float32 [B], not weighted."""
    return {name: TABLE[name](terms(answers, labels, name, c), c) for name in c.loss}


def start_losses(labels: Labels, c: PreferenceConfig) -> dict[str, Tensor]:
    """Return `pair_losses` where policy and reference are equal; not of rows without a reference."""
    zero, one = torch.zeros_like(labels.margin), torch.ones_like(labels.margin)
    labels = labels._replace(partners=Partners(zero, zero, zero))
    losses = pair_losses(PairLogprobs(zero, zero, one, one, -one, -one), labels, c)
    return {name: x for name, x in losses.items() if name not in OF_MEANS}


def total(losses: dict[str, Tensor], c: PreferenceConfig) -> Tensor:
    """Return the weighted sum of `pair_losses`, float32 [B]."""
    parts = [weight * losses[name] for name, weight in c.weighted().items()]
    return torch.stack(parts).sum(0)


def rewards(answers: PairLogprobs, labels: Labels, c: PreferenceConfig) -> tuple[Tensor, Tensor]:
    """Return beta g of the chosen and of the rejected answers [B] for the first entry of `c.loss`, without gradient.
    Their order is whether the policy prefers as the data does."""
    t = terms(answers, labels, c.loss[0], c)
    pair = (t.chosen_mean, t.rejected_mean) if c.loss[0] in OF_MEANS else (t.chosen, t.rejected)
    return c.beta * pair[0].detach(), c.beta * pair[1].detach()


def agreement(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return 1 where the chosen answer has the larger number, 1/2 where they are equal."""
    return ((chosen - rejected).sign() + 1) / 2


def likelihood_weights(logprobs: Tensor, log_squares: Tensor, mask: Tensor) -> Tensor:
    """Return WPO's weight of each pair, float32 [B], no gradient: e^(mean over the tokens of log p_t - log sum_v
    p_v^2) of the chosen answer times that of the rejected one. logprobs, log_squares, mask [2B, T]. Source:
    arXiv:2406.11827, sampled alignment."""
    on = mask.bool()
    each = torch.where(on, (logprobs - log_squares).detach(), 0.0).sum(1) / on.sum(1)
    return (each[0::2] + each[1::2]).exp()


# --- the table


def _sigmoid(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return DPO's loss, arXiv:2305.18290, equation 7; with label smoothing cDPO."""
    return _smoothed(t.z, c)


def _robust(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return a loss that is unbiased under a share e of flipped labels, arXiv:2403.00409. Unbounded below."""
    e = c.label_smoothing
    return ((1 - e) * softplus(-t.z) - e * softplus(t.z)) / (1 - 2 * e)


def _hinge(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return the loss of SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657."""
    return torch.relu(1 - t.z)


def _ipo(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return IPO's loss, arXiv:2310.12036 (there of sums; here by `length`)."""
    return (t.h - 1 / (2 * c.beta)).square()


def _exo_pair(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return the reverse KL to the smoothed label, arXiv:2402.00856."""
    e = c.label_smoothing or 1e-3
    return _reverse(t.z, math.log(1 - e), math.log(e))


def _nca_pair(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return NCA's loss, arXiv:2402.05369, K = 2."""
    chosen, rejected = c.beta * t.chosen, c.beta * t.rejected
    return softplus(-chosen) + 0.5 * softplus(chosen) + 0.5 * softplus(rejected)


def _bco_pair(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return BCO's loss, arXiv:2404.04656, with a reward shift of 0."""
    return softplus(-c.beta * t.chosen) + softplus(c.beta * t.rejected)


def _sppo_hard(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return SPPO's loss, arXiv:2405.00675, with certain preferences."""
    half = 1 / (2 * c.beta)
    return (t.chosen - half).square() + (t.rejected + half).square()


def _apo_zero(t: Terms, c: PreferenceConfig) -> Tensor:
    """Move chosen up and rejected down, arXiv:2408.06266."""
    return torch.sigmoid(-c.beta * t.chosen) + torch.sigmoid(c.beta * t.rejected)


def _apo_down(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return APO's loss for a model that is better than its chosen answers, arXiv:2408.06266."""
    return torch.sigmoid(c.beta * t.chosen) + torch.sigmoid(-c.beta * t.h)


def _discopop(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return the log-ratio modulated loss, arXiv:2406.08414. e^-z w is one exponent: separately they are inf * 0 for
    z << 0."""
    w = torch.sigmoid(t.z / c.tau)
    return softplus(-t.z) * (1 - w) + (logsigmoid(t.z / c.tau) - t.z).clamp(max=MOST).exp()


def _orpo(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return the odds ratio loss of the mean logprobs, arXiv:2403.07691; its NLL is `nll_coef`."""
    return c.beta * softplus(_log_odds(t.rejected_mean) - _log_odds(t.chosen_mean))


def _alphapo(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return SimPO's loss with another shape of reward, arXiv:2501.03884."""

    def shaped(mean: Tensor) -> Tensor:
        a = c.alphapo_alpha
        return -torch.expm1((-a * mean).clamp(max=MOST)) / a if a else mean

    return softplus(c.gamma - c.beta * (shaped(t.chosen_mean) - shaped(t.rejected_mean)))


def _rpo_bwd_kl(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return the KL of the rewards' preference to the policy's, arXiv:2406.11704 (Reward-aware Preference
    Optimization)."""
    p = torch.sigmoid(t.target)
    return p * (logsigmoid(t.target) - logsigmoid(t.z)) + (1 - p) * (logsigmoid(-t.target) - logsigmoid(-t.z))


def _rpo_fwd_kl(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return the KL of the policy's preference to the rewards'."""
    return _reverse(t.z, logsigmoid(t.target), logsigmoid(-t.target))


def _rpo_sq(t: Terms, c: PreferenceConfig) -> Tensor:
    """Return (beta h - rpo_scale * gap)^2."""
    return (c.beta * t.h - t.target).square()


def _aot(t: Terms, c: PreferenceConfig) -> Tensor:
    """Align the distributions of h by optimal transport, arXiv:2406.05882."""
    assert t.partners is not None, "of a whole minibatch"
    return _smoothed(c.beta * (t.h + t.partners.shift), c)


def _aot_unpaired(t: Terms, c: PreferenceConfig) -> Tensor:
    """Align the distributions of chosen and rejected answers. The value is by the chosen answer's couple. The
    gradient is each answer's own, which may be computed apart from the other's."""
    assert t.partners is not None, "of a whole minibatch"
    chosen = _smoothed(c.beta * (t.chosen - t.partners.of_chosen), c)
    rejected = _smoothed(c.beta * (t.partners.of_rejected - t.rejected), c)
    return chosen + rejected - rejected.detach()


def _smoothed(z: Tensor, c: PreferenceConfig) -> Tensor:
    """Return -logsigmoid(z), and of -z for the share of labels that is wrong."""
    e = c.label_smoothing
    return (1 - e) * softplus(-z) + e * softplus(z)


def _reverse(z: Tensor, log_yes: Tensor | float, log_no: Tensor | float) -> Tensor:
    """Return KL(Bernoulli(sigmoid(z)) || Bernoulli(e^log_yes))."""
    q = torch.sigmoid(z)
    return q * (logsigmoid(z) - log_yes) + (1 - q) * (logsigmoid(-z) - log_no)


def _log_odds(x: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = e^x; log(1 - e^x) in the form that is exact on its side of -ln 2."""
    x = x.clamp(max=SURE)
    near = x > -math.log(2)  # each branch gets only values in its range, or its gradient would be NaN * 0
    close, far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return x - torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))


TABLE: dict[str, Row] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "exo_pair": _exo_pair,
    "discopop": _discopop,
    "rpo_bwd_kl": _rpo_bwd_kl,
    "rpo_fwd_kl": _rpo_fwd_kl,
    "ipo": _ipo,
    "rpo_sq": _rpo_sq,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "orpo": _orpo,
    "alphapo": _alphapo,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
}
