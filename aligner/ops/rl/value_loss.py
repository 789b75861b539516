"""The critic's loss, and the share of the returns' variance that it explains."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueTerm(NamedTuple):
    """Unmasked terms of the value loss: the caller masks and aggregates."""

    per_token: Tensor  # float32 [B, T], to be minimised
    clipped: Tensor  # bool [B, T], the clipped branch is the larger one: no gradient


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> ValueTerm:
    """Return 0.5 * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), all [B, T]; clip 0 is off.

    Source: OpenAI baselines' ppo2; "What matters in on-policy RL", arXiv:2006.05990.
    """
    values, old_values, returns = values.float(), old_values.float(), returns.float()
    plain = (values - returns).square()
    if not clip:
        return ValueTerm(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    moved = values - old_values
    bounded = (old_values + moved.clamp(-clip, clip) - returns).square()
    # within the clip both are the same but for rounding
    clipped = (moved.detach().abs() > clip) & (bounded.detach() > plain.detach())
    return ValueTerm(0.5 * torch.maximum(plain, bounded), clipped)


@torch.no_grad()
def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return float64 [5]: n, sum r, sum r^2, sum (r-v), sum (r-v)^2 over masked tokens. Add these over ranks and
    batches."""
    on = mask.bool()
    r = torch.where(on, returns.double(), 0.0)
    error = torch.where(on, returns.double() - values.double(), 0.0)
    return torch.stack([on.sum().double(), r.sum(), r.square().sum(), error.sum(), error.square().sum()])


def explained_variance(sums: Tensor) -> float:
    """Return 1 - Var(r - v) / Var(r) from `explained_variance_sums`: 1 is perfect, 0 is no better than a constant,
    below 0 worse than that. 0 where the returns do not vary."""
    n, r, r2, e, e2 = sums.tolist()
    if n < 1:
        return 0.0
    var_r, var_e = r2 / n - (r / n) ** 2, e2 / n - (e / n) ** 2
    # a variance below float64's rounding of its own sums is none
    return 1.0 - var_e / var_r if var_r > 1e-12 * (r2 / n) else 0.0
