"""Policy losses whose ratio is a whole response's. Rows are never split, so a micro-batch is enough.

All [B, T]; mask is 1 on the tokens that count. Both are meant for the aggregation `seq_mean_token_mean`, the mean
over sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.ops.rl.policy_term import PolicyTerm, log_ratio


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyTerm:
    """Return max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), with the ratio of the sequence, s = exp(mean_t log
    r_t).

    s is on each token as sg(s) * exp(logprobs - sg(logprobs)): the value is the sequence's and the gradient each
    token's own, so that A may differ between tokens. Bounds of 3e-4 and 4e-4 are typical. Each log r_t is within
    +-20; veRL limits log s at 10, TRL nothing: the limit keeps exp finite and is not met otherwise. Source: GSPO,
    arXiv:2507.18071 (GSPO-token).
    """
    on, a = mask.bool(), advantages.float()
    s = _mean(log_ratio(logprobs, old_logprobs).detach(), on).exp()
    ratio = s * torch.exp(logprobs.float() - logprobs.float().detach())
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high))
    value = ratio.detach()
    return PolicyTerm(loss, value, (a < 0) & (value < 1 - clip_low), (a > 0) & (value > 1 + clip_high))


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyTerm:
    """Return -A exp(mean_t s min(s lr_t, s clip(lr_t, -clip_low, clip_high))), s = sign(A), on every token of the
    row.

    The bounds are on the log-ratio. A is the row's: the advantages must be constant over its tokens. Weights of
    tokens (engine against trainer) multiply this term, so a response has their mean. veRL takes the geometric mean,
    by which a token of weight 0 would remove its response. Source: GMPO, arXiv:2507.20673.
    """
    on = mask.bool()
    lr = log_ratio(logprobs, old_logprobs)
    a = _mean(advantages.float(), on)
    s = a.sign()
    kept = s * torch.minimum(s * lr, s * lr.clamp(-clip_low, clip_high))
    loss = (-a * _mean(kept, on).exp()).expand_as(lr)
    ratio = lr.detach().exp()
    return PolicyTerm(loss, ratio, (s < 0) & (lr.detach() < -clip_low), (s > 0) & (lr.detach() > clip_high))


def _mean(x: Tensor, on: Tensor) -> Tensor:
    """Return the mean over a row's masked tokens, [B, 1]; 0 for a row without any."""
    return torch.where(on, x, 0.0).sum(1, keepdim=True) / on.sum(1, keepdim=True).clamp_min(1)
