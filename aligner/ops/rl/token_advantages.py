"""Rewards, returns and advantages per token, and their whitening over a rollout. All [B, T] unless said otherwise."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import sum_over


def token_rewards(scores: Tensor, response_mask: Tensor, kl: Tensor | None, coef: float) -> Tensor:
    """Return rewards per token, float32 [B, T]: scores [B] at the row's last response token, minus coef * kl on each
    one.

    response_mask [B, T], kl [B, T] or None (no penalty). A row without response tokens gets 0 everywhere.
    """
    on = response_mask.bool()
    position = torch.arange(on.shape[1], device=on.device)
    last = torch.where(on, position, -1).amax(1, keepdim=True)
    rewards = torch.where(on & (position == last), scores.float()[:, None], 0.0)
    return rewards if kl is None else rewards - coef * torch.where(on, kl.float(), 0.0)


def broadcast(advantage: Tensor, mask: Tensor) -> Tensor:
    """Return the sample's advantage [B] on each of its masked tokens, float32 [B, T]."""
    return torch.where(mask.bool(), advantage.float()[:, None], 0.0)


@torch.no_grad()
def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE: (advantages, returns), each float32 [B, T] and 0 where mask is 0.

    token_rewards, values, mask [B, T]; values[:, t] is the value of the state before tokens[:, t]. lam: one number,
    or one for each row [B].

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V. Beyond a row's last
    masked token V and A are 0. Where mask is 0 between masked tokens (tool output) V_{t+1} and A_{t+1} pass through
    unchanged, so that the tokens on both sides are neighbours. Source: arXiv:1506.02438, equation 16.
    """
    on = mask.bool()
    values, token_rewards = values.float(), token_rewards.float()
    advantages = torch.zeros_like(values)
    columns = on.any(0).nonzero().flatten()
    first, end = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
    next_value = torch.zeros_like(values[:, 0])
    carried = torch.zeros_like(next_value)
    for t in range(end - 1, first - 1, -1):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        carried = torch.where(on[:, t], delta + gamma * lam * carried, carried)
        next_value = torch.where(on[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(on[:, t], carried, 0.0)
    return advantages, torch.where(on, advantages + values, 0.0)


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """Return lambda = 1 - 1 / (alpha l), float32 [B], of rows with l masked tokens; 0 where alpha l < 1.

    The weights of GAE's errors then add up to alpha l. Source: VAPO, arXiv:2504.05118; alpha there: 0.05.
    """
    return (1 - 1 / (alpha * mask.sum(1).double()).clamp_min(1)).float()


def return_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1}, float32 [B, T], 0 where mask is 0; tool output is skipped as in `gae`.

    With -beta k1 in the token rewards, and whitened, this is the advantage of REINFORCE++, arXiv:2501.03262.
    """
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma, 1.0)[0]


@torch.no_grad()
def whiten(
    x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None, shift_mean: bool = True, ddof: int = 0
) -> Tensor:
    """Return (x - mu) * rsqrt(var + 1e-8) over all masked entries of all ranks of `group`; 0 where mask is 0; float32
    [B, T].

    var has n - ddof in its denominator. Without `shift_mean`, mu is added back after scaling (as TRL and verl do).
    """
    on = mask.bool()
    inside = torch.where(on, x.double(), 0.0)
    total, n = sum_over(torch.stack([inside.sum(), on.sum().double()]), group)
    mu = total / n.clamp_min(1)
    centred = torch.where(on, inside - mu, 0.0)
    var = sum_over(centred.square().sum(), group) / (n - ddof).clamp_min(1)
    scaled = centred * (var + 1e-8).rsqrt()
    return (scaled if shift_mean else torch.where(on, scaled + mu, 0.0)).float()
