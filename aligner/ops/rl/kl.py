"""KL estimators between the policy and its reference, and the controller of their coefficient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aligner.config.on_demand import on_demand
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.user_code import is_path

LOG_RATIO_LIMIT = 20.0  # |log ratio| before exp; e^20 is still far from the limits of float32
K3_LIMIT = 10.0
# nats between a token's logprobs from two forward passes of the same weights in other batches, by the model's dtype:
# above what rounding does to nearly all tokens, below what an update does to those it moves
NOISE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-2}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, noise: float = NOISE[torch.float32]) -> Tensor:
    """Estimate KL(policy || reference) per token from tokens the policy sampled, [..., T] -> [..., T] float32.

    d = logprobs - ref_logprobs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, with d clamped to +-20 and the result to
    +-10; abs = |d|, by `magnitude`. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2, which is that
    of the true KL in expectation (the gradient of k1 has expectation 0). Source: J. Schulman, "Approximating KL
    divergence" (2020); straight-through forms as in verl.
    """
    policy = logprobs if logprobs.element_size() >= 4 else logprobs.float()
    d = policy - ref_logprobs.to(policy.dtype)
    if estimator.endswith("+"):
        k2 = d.square() / 2
        return _plain(d, estimator[:-1], noise).detach() + (k2 - k2.detach())
    return _plain(d, estimator, noise)


def kl_estimator(cfg: AlgorithmConfig, noise: float = NOISE[torch.float32]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the estimator of `kl.estimator`, f(logprobs, ref_logprobs): `kl_estimate`, or a function of the user's."""
    if is_path(cfg.kl.estimator):
        return on_demand("algorithm.kl.estimator")(cfg)
    return partial(kl_estimate, estimator=cfg.kl.estimator, noise=noise)


def magnitude(d: Tensor, noise: float) -> Tensor:
    """Return |d| of log-ratios, with the gradient sign(d) * clip(|d| / noise - 1, 0, 1): none up to `noise`, all from
    twice.

    Where policy and reference are the same, d is a rounding error, of either sign, and the gradient of |d| would be
    that of noise: another one in each layout. The derivative at 0 is 0 in the published code, too (torch's abs in
    verl's kl_cov), which meets it wherever both logprobs come from the same pass. The value is |d| everywhere.
    """
    at = d.detach()
    slope = at.sign() * (at.abs() / noise - 1).clamp(0, 1)
    return at.abs() + slope * (d - at)


def _plain(d: Tensor, estimator: str, noise: float) -> Tensor:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "abs":
        return magnitude(d, noise)
    assert estimator == "k3", f"KL estimator {estimator!r}"
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ((-d).expm1() + d).clamp(-K3_LIMIT, K3_LIMIT)


@torch.no_grad()
def reference_kl_sums(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return numerators and denominators (`LossOutput.means`) of KL(policy || reference) over the tokens in mask, all
    [B, T]: `kl/ref_k1` and `kl/ref_k3` by token; by sequence with tokens the mean and the sum of k1 over its tokens.
    """
    on = mask.bool()
    d = torch.where(on, (logprobs.double() - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    k3 = torch.where(on, torch.exp(-d) - 1 + d, 0.0)
    tokens, rows = on.sum(1), on.any(1).sum()
    return {
        "kl/ref_k1": (d.sum(), tokens.sum()),
        "kl/ref_k3": (k3.sum(), tokens.sum()),
        "kl/ref_k1_sequence_mean": ((d.sum(1) / tokens.clamp_min(1)).sum(), rows),
        "kl/ref_k1_sequence_sum": (d.sum(), rows),
    }


def adapt_kl_coef(coef: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon), after a rollout of `samples` samples.

    Proportional controller in log space of Ziegler et al., arXiv:1909.08593.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * samples / horizon)
