"""KL estimators between the policy and its reference, and the controller of their coefficient."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # |log ratio| before exp; e^20 is still far from the limits of float32
K3_LIMIT = 10.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens the policy sampled, [..., T] -> [..., T] float32.

    d = logprobs - ref_logprobs:  k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d, with d clamped to +-20 and the result
    to +-10;  abs = |d|. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2, which is that of the true
    KL in expectation (the gradient of k1 has expectation 0). Source: J. Schulman, "Approximating KL divergence" (2020);
    straight-through forms as in verl.
    """
    policy = logprobs if logprobs.element_size() >= 4 else logprobs.float()
    d = policy - ref_logprobs.to(policy.dtype)
    if estimator.endswith("+"):
        k2 = d.square() / 2
        return _plain(d, estimator[:-1]).detach() + (k2 - k2.detach())
    return _plain(d, estimator)


def _plain(d: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "abs":
        return d.abs()
    assert estimator == "k3", f"KL estimator {estimator!r}"
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ((-d).expm1() + d).clamp(-K3_LIMIT, K3_LIMIT)


def adapt_kl_coef(coef: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon), after a rollout of `samples` samples.

    Proportional controller in log space of Ziegler et al., arXiv:1909.08593.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * samples / horizon)
