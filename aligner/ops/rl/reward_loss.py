"""Losses of the reward model, one number per pair or sample; the caller sums and divides by the minibatch's count."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None, center_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -log sigmoid(r_c - r_r - margin) + center_coef * (r_c + r_r)^2 per pair, float32 [B].

    chosen, rejected, margin [B]. The second result has per-pair values without gradient, float32 [B]: `accuracy` (1
    if r_c > r_r, 1/2 if equal), `margin` (r_c - r_r), `chosen_mean`, `rejected_mean`; their means are the metrics
    `rm/*`. Sources: arXiv:2203.02155, equation 1; margin arXiv:2307.09288, equation 2; centre term arXiv:2312.09244.
    """
    chosen, rejected = chosen.float(), rejected.float()
    difference = chosen - rejected
    loss = -logsigmoid(difference if margin is None else difference - margin.float())
    if center_coef:
        loss = loss + center_coef * (chosen + rejected).square()
    difference = difference.detach()
    stats = {
        "accuracy": (difference.sign() + 1) / 2,
        "margin": difference,
        "chosen_mean": chosen.detach(),
        "rejected_mean": rejected.detach(),
    }
    return loss, stats


def steps(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -label log sigmoid(x) - (1 - label) log sigmoid(-x) of each step, float32 in the arguments' shape;
    labels in [0, 1]. Source: arXiv:2305.20050, with one logit for two classes."""
    return binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")


def rightly(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 where the likelier side of a step is the label's, 1/2 where neither is likelier, in the arguments'
    shape."""
    return 0.5 + 0.5 * (logits.sign() * (labels - 0.5).sign()).float()


def regression(pred: Tensor, target: Tensor) -> Tensor:
    """Return the mean of (pred - target)^2 over the attributes that are not NaN, per sample: [B, K], [B, K] ->
    float32 [B].

    A sample with no target at all has loss 0. NeMo averages the attributes of a micro-batch, which would make the
    gradient depend on how a minibatch is cut. Source: SteerLM / HelpSteer attribute heads, arXiv:2310.05344.
    """
    known = ~target.isnan()
    # NaN must leave before the subtraction, or its gradient is NaN * 0
    error = pred.float() - torch.where(known, target.float(), 0.0)
    return torch.where(known, error, 0.0).square().sum(1) / known.sum(1).clamp_min(1)
