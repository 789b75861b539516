"""Policy losses per token; `ops.aggregate` turns them into one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.config.schema import AlgorithmConfig
from aligner.ops.kl import LOG_RATIO_LIMIT


class PolicyTerm(NamedTuple):
    """Nothing here is masked yet: the caller masks and aggregates. Only `per_token` has a gradient."""

    per_token: Tensor  # float32 [B, T], to be minimised
    ratio: Tensor  # float32 [B, T], policy now / policy before the update
    clipped_low: Tensor  # bool [B, T], no gradient because the ratio is below its bound
    clipped_high: Tensor  # bool [B, T], no gradient because the ratio is above its bound (dual clip included)


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyTerm:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 and dual_clip = c > 0: min(that, -A c).

    All [B, T]; r = exp(clamp(logprobs - old_logprobs, -20, 20)). Sources: arXiv:1707.06347, equation 7; separate
    bounds DAPO, arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    r = _ratio(logprobs, old_logprobs)
    a = advantages.float()
    loss = torch.maximum(-a * r, -a * r.clamp(1 - clip_low, 1 + clip_high))
    low, high = (a < 0) & (r < 1 - clip_low), (a > 0) & (r > 1 + clip_high)
    if dual_clip:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual_clip), loss)
        high = high | ((a < 0) & (r > dual_clip))
    return PolicyTerm(loss, r.detach(), low, high)


def reinforce(logprobs: Tensor, advantages: Tensor) -> PolicyTerm:
    """-A * logprobs, all [B, T]; ratio 1, nothing clipped. Source: Williams 1992, doi:10.1007/BF00992696."""
    none = torch.zeros_like(advantages, dtype=torch.bool)
    ones = torch.ones_like(advantages, dtype=torch.float32)
    return PolicyTerm(-advantages.float() * logprobs.float(), ones, none, none)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs.float() - old_logprobs.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cfg: AlgorithmConfig) -> PolicyTerm:
    return ppo(logprobs, old_logprobs, advantages, cfg.clip_low, cfg.clip_high, cfg.dual_clip)


def _reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cfg: AlgorithmConfig) -> PolicyTerm:
    return reinforce(logprobs, advantages)._replace(ratio=_ratio(logprobs, old_logprobs).detach())


# `algorithm.policy_loss` -> f(logprobs, old_logprobs, advantages, cfg.algorithm)
POLICY_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], PolicyTerm]] = {
    "ppo": _ppo,
    "reinforce": _reinforce,
}
