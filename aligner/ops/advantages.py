"""From rewards to advantages: group baselines, generalised advantage estimation, whitening.

Group functions see the rows of one rank; all rows of a group are on one rank. Sums are in float64: a group's baseline
and the whitening of a rollout should not depend on the order in which ranks add.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import sum_over


def group_mean_std(scores: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std (ddof=1) and number of the valid samples of each row's group, as float64 [B] rows.

    scores [B], group int64 [B] (any labels), valid bool [B]. std is exactly 0 where all valid scores of the group are
    equal, and where fewer than two are valid. A group without valid samples has mean 0. Invalid scores may be NaN.
    """
    _, slot = torch.unique(group, return_inverse=True)
    valid = valid.bool()
    x = torch.where(valid, scores.double(), 0.0)
    count = _per_group(valid.double(), slot)
    mean = _per_group(x, slot) / count.clamp_min(1)
    spread = torch.where(valid, x - mean, 0.0).square()
    std = (_per_group(spread, slot) / (count - 1).clamp_min(1)).sqrt()
    # rounding of the mean must not turn equal scores into a tiny std: compare the scores themselves
    low = torch.full_like(x, torch.inf).scatter_reduce(0, slot, torch.where(valid, x, torch.inf), "amin")[slot]
    high = torch.full_like(x, -torch.inf).scatter_reduce(0, slot, torch.where(valid, x, -torch.inf), "amax")[slot]
    return mean, torch.where(high > low, std, 0.0), count


def _per_group(x: Tensor, slot: Tensor) -> Tensor:
    """Sum of x [B] over the rows of each row's group, [B]."""
    return torch.zeros_like(x).index_add(0, slot, x)[slot]


def grpo(scores: Tensor, group: Tensor, valid: Tensor, eps: float = 1e-6) -> Tensor:
    """(s - mean_G) / (std_G + eps), std with ddof=1; float32 [B].

    Exactly 0 for invalid samples, degenerate groups (std 0) and groups with fewer than two valid samples, here and in
    the two below. Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """
    mean, std, _ = group_mean_std(scores, group, valid)
    return _where_learnable(std, valid, (scores.double() - mean) / (std + eps))


def dr_grpo(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """s - mean_G; float32 [B]. Source: "Understanding R1-Zero-like training", arXiv:2503.20783."""
    mean, std, _ = group_mean_std(scores, group, valid)
    return _where_learnable(std, valid, scores.double() - mean)


def rloo(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """s_i - mean of the group's other valid samples = (s_i - mean_G) * n / (n - 1); float32 [B].

    Source: "Back to basics", arXiv:2402.14740.
    """
    mean, std, count = group_mean_std(scores, group, valid)
    return _where_learnable(std, valid, (scores.double() - mean) * count / (count - 1).clamp_min(1))


def _where_learnable(std: Tensor, valid: Tensor, advantage: Tensor) -> Tensor:
    return torch.where((std > 0) & valid.bool(), advantage, 0.0).float()


def count_degenerate(scores: Tensor, group: Tensor, valid: Tensor) -> tuple[int, int]:
    """(groups without any gradient, all groups) among these rows.

    Without gradient: all valid scores equal, or fewer than two valid samples.
    """
    _, std, _ = group_mean_std(scores, group, valid)
    total = torch.unique(group).numel()
    return total - torch.unique(group[std > 0]).numel(), total


@torch.no_grad()
def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, (advantages, returns), each float32 [B, T] and 0 where mask is 0.

    token_rewards, values, mask [B, T]; values[:, t] is the value of the state before tokens[:, t].
    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V. Beyond a row's last
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


@torch.no_grad()
def whiten(
    x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None, shift_mean: bool = True, ddof: int = 0
) -> Tensor:
    """(x - mu) * rsqrt(var + 1e-8) over all masked entries of all ranks of `group`; 0 where mask is 0; float32 [B, T].

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


def token_rewards(scores: Tensor, response_mask: Tensor, kl: Tensor | None, coef: float) -> Tensor:
    """Rewards per token, float32 [B, T]: scores [B] at the row's last response token, minus coef * kl on each one.

    response_mask [B, T], kl [B, T] or None (no penalty). A row without response tokens gets 0 everywhere.
    """
    on = response_mask.bool()
    position = torch.arange(on.shape[1], device=on.device)
    last = torch.where(on, position, -1).amax(1, keepdim=True)
    rewards = torch.where(on & (position == last), scores.float()[:, None], 0.0)
    return rewards if kl is None else rewards - coef * torch.where(on, kl.float(), 0.0)


def broadcast(advantage: Tensor, mask: Tensor) -> Tensor:
    """The sample's advantage [B] on each of its masked tokens, float32 [B, T]."""
    return torch.where(mask.bool(), advantage.float()[:, None], 0.0)
