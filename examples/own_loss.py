"""A policy loss and an advantage of your own (docs/how-to/losses.md)."""

import torch
from torch import Tensor


def capped_sequence(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cap: float = 1.5
) -> Tensor:
    """Weigh REINFORCE's loss of each token by the ratio of its whole response, at most `cap`. All [B, T]."""
    difference = ((logprobs.detach() - old_logprobs) * mask).sum(1, keepdim=True)
    ratio = (difference / mask.sum(1, keepdim=True).clamp_min(1)).exp().clamp(max=cap)
    return -ratio * advantages * logprobs


def over_median(rewards: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Compare each sample's reward with the median of its prompt's valid samples. All [B]."""
    advantages = torch.zeros_like(rewards)
    for prompt in group.unique():
        rows = (group == prompt) & valid
        if rows.any():
            advantages[rows] = rewards[rows] - rewards[rows].quantile(0.5)
    return advantages
