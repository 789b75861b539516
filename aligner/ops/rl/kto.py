"""KTO's loss of single answers (Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8).

D  = sum over an answer's tokens of logprob - ref_logprob, built per token and then summed
z0 = max(0, mean over the minibatch of D of mismatched answers: other samples' answers after this sample's prompt),
     without gradient
desirable: weight (1 - sigmoid(beta (D - z0)));  undesirable: weight (1 - sigmoid(beta (z0 - D)))
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from aligner.config.sections.kto import KtoConfig


def mismatched(prompts: Sequence[Hashable]) -> list[int] | None:
    """Return for each sample, by the prompts of all, the number of the nearest earlier one with another prompt; the
    last is earlier than the first. None if all have one prompt."""
    count = len(prompts)
    changes = [i for i in range(count) if prompts[i] != prompts[i - 1]]
    if not changes:
        return None
    partners = [0] * count
    for index in range(changes[0], changes[0] + count):
        i, before = index % count, (index - 1) % count
        partners[i] = before if prompts[before] != prompts[i] else partners[before]
    return partners


def log_ratios(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Return D of each row, float32 [B]; logprobs, reference, mask [B, T]."""
    return torch.where(mask.bool(), logprobs - reference.to(logprobs.dtype), 0.0).sum(1)


def sample_losses(ratios: Tensor, desirable: Tensor, z0: float, c: KtoConfig) -> Tensor:
    """Return the loss of each sample; ratios (D) and desirable (1 or 0) float32 [B]."""
    weights = desirable * c.desirable_weight + (1 - desirable) * c.undesirable_weight
    return weights * torch.sigmoid(-c.beta * (2 * desirable - 1) * (ratios - z0))


def above(chosen: Tensor, rejected: Tensor) -> float:
    """Return the share of all couples of a number of `chosen` [n] and one of `rejected` [m] where the first is
    larger; a tie counts half. NaN if one is empty."""
    below = rejected.sort().values
    wins = torch.searchsorted(below, chosen) + torch.searchsorted(below, chosen, right=True)
    return float(wins.double().mean() / 2 / len(rejected)) if len(rejected) else math.nan
