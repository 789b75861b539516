"""Policy losses per token; `ops/rl/aggregate.py` turns them into one number. Those of whole sequences are in
`sequence_loss.py`.

All tensors are [B, T]; lr = clamp(logprobs - old_logprobs, -20, 20), r = exp(lr).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.ops.rl.kl import magnitude
from aligner.ops.rl.policy_term import PolicyTerm, log_ratio
from aligner.ops.rl.sequence_loss import gmpo, gspo
from aligner.types import PolicyTargets


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyTerm:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 and dual_clip = c > 0: min(that, -A c).

    Sources: arXiv:1707.06347, equation 7; separate bounds DAPO, arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    r = log_ratio(logprobs, old_logprobs).exp()
    a = advantages.float()
    loss = torch.maximum(-a * r, -a * r.clamp(1 - clip_low, 1 + clip_high))
    low, high = (a < 0) & (r < 1 - clip_low), (a > 0) & (r > 1 + clip_high)
    if dual_clip:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual_clip), loss)
        high = high | ((a < 0) & (r > dual_clip))
    return PolicyTerm(loss, r.detach(), low, high)


def reinforce(logprobs: Tensor, advantages: Tensor) -> PolicyTerm:
    """Return -A * logprobs; ratio 1, nothing clipped. Also GPG's loss (arXiv:2504.02546).

    Source: Williams 1992, doi:10.1007/BF00992696.
    """
    none = torch.zeros_like(advantages, dtype=torch.bool)
    ones = torch.ones_like(advantages, dtype=torch.float32)
    return PolicyTerm(-advantages.float() * logprobs.float(), ones, none, none)


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, ratio_cap: float) -> PolicyTerm:
    """Return -sg(min(r, ratio_cap)) * A * logprobs: a capped token keeps its gradient. ratio_cap is a raw ratio,
    about 5.

    Source: CISPO of MiniMax-M1, arXiv:2506.13585, without a lower bound.
    """
    r = log_ratio(logprobs, old_logprobs).detach().exp()
    loss = -r.clamp(max=ratio_cap) * advantages.float() * logprobs.float()
    return PolicyTerm(loss, r, torch.zeros_like(r, dtype=torch.bool), r > ratio_cap)


def sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> PolicyTerm:
    """Return -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg: a soft gate in place of the
    clip.

    Its gradient at r = 1 is REINFORCE's. Source: SAPO, arXiv:2511.20347.
    """
    r = log_ratio(logprobs, old_logprobs).exp()
    a = advantages.float()
    tau = torch.where(a > 0, tau_pos, tau_neg)
    none = torch.zeros_like(a, dtype=torch.bool)
    return PolicyTerm(-a * (4 / tau) * torch.sigmoid(tau * (r - 1)), r.detach(), none, none)


def dppo(
    logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, limit: float, penalty: float
) -> PolicyTerm:
    """Return -A exp(lr), lr = clamp(logprobs - rollout_logprobs, -20, 20), dropped where A > 0 and pi - mu > limit or
    A < 0 and pi - mu < -limit; plus penalty * (logprobs - rollout_logprobs)^2 on all tokens.

    pi = exp(logprobs) and mu = exp(rollout_logprobs) are probabilities: the bound is on the divergence rather than on
    the ratio. Source: DPPO, arXiv:2602.04879 (binary total variation); the penalty is prime-rl's.
    """
    a = advantages.float()
    moved = (logprobs.float().exp() - rollout_logprobs.float().exp()).detach()
    low, high = (a < 0) & (moved < -limit), (a > 0) & (moved > limit)
    surrogate = torch.where(low | high, 0.0, -a * log_ratio(logprobs, rollout_logprobs).exp())
    loss = surrogate + penalty * (logprobs.float() - rollout_logprobs.float()).square()
    return PolicyTerm(loss, log_ratio(logprobs, old_logprobs).detach().exp(), low, high)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    chosen: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyTerm:
    """Return `ppo` without the tokens that `ops.covariance.choose_random` chose (1 there, 0 elsewhere). They are
    drawn from all tokens within the bounds, as in the paper; veRL leaves out those that the clip holds already.

    Source: Clip-Cov of "The entropy mechanism of RL for reasoning language models", arXiv:2505.22617.
    """
    term = ppo(logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip)
    return term._replace(per_token=torch.where(chosen.bool(), 0.0, term.per_token))


def kl_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, chosen: Tensor, coef: float, noise: float
) -> PolicyTerm:
    """Return -A r, plus coef |lr| on the chosen tokens; nothing is clipped. |lr| has no gradient within the `noise`
    of two forward passes (`magnitude`), so it has none in a rollout's first update. Source: KL-Cov, arXiv:2505.22617.
    """
    lr = log_ratio(logprobs, old_logprobs)
    loss = -advantages.float() * lr.exp() + torch.where(chosen.bool(), coef * magnitude(lr, noise), 0.0)
    none = torch.zeros_like(lr, dtype=torch.bool)
    return PolicyTerm(loss, lr.detach().exp(), none, none)


def _reinforce(
    logprobs: Tensor, targets: PolicyTargets, mask: Tensor, cfg: AlgorithmConfig, noise: float
) -> PolicyTerm:
    ratio = log_ratio(logprobs, targets.old_logprobs).detach().exp()
    return reinforce(logprobs, targets.advantages)._replace(ratio=ratio)


# `algorithm.policy_loss` -> f(logprobs, targets and loss mask of a micro-batch, cfg.algorithm, NOISE of the dtype)
POLICY_LOSSES: dict[str, Callable[[Tensor, PolicyTargets, Tensor, AlgorithmConfig, float], PolicyTerm]] = {
    "ppo": lambda lp, t, m, c, _: ppo(lp, t.old_logprobs, t.advantages, c.clip_low, c.clip_high, c.dual_clip),
    "gspo": lambda lp, t, m, c, _: gspo(lp, t.old_logprobs, t.advantages, m, c.clip_low, c.clip_high),
    "cispo": lambda lp, t, m, c, _: cispo(lp, t.old_logprobs, t.advantages, c.ratio_cap),
    "sapo": lambda lp, t, m, c, _: sapo(lp, t.old_logprobs, t.advantages, c.sapo.tau_pos, c.sapo.tau_neg),
    "gmpo": lambda lp, t, m, c, _: gmpo(lp, t.old_logprobs, t.advantages, m, c.clip_low, c.clip_high),
    "dppo": lambda lp, t, m, c, _: dppo(
        lp, t.old_logprobs, t.rollout_logprobs, t.advantages, c.dppo.limit, c.dppo.penalty
    ),
    "gpg": _reinforce,
    "reinforce": _reinforce,
    "clip_cov": lambda lp, t, m, c, _: clip_cov(
        lp, t.old_logprobs, t.advantages, t.chosen, c.clip_low, c.clip_high, c.dual_clip
    ),
    "kl_cov": lambda lp, t, m, c, noise: kl_cov(lp, t.old_logprobs, t.advantages, t.chosen, c.cov.kl_coef, noise),
}
