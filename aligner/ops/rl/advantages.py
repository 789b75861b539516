"""Advantages of whole samples: a baseline from the other samples of the prompt, or from its greedy response.

All functions see the rows of one rank; all rows of a group are on one rank. Shared shapes: scores [B], the sum of a
sample's token rewards; group int64 [B], any labels; valid bool [B]; result float32 [B]. Invalid scores may be NaN.

Results are exactly 0 for invalid samples, and in all but `remax` for the samples of a group without gradient:
degenerate (all valid scores equal) or with fewer than two valid samples. Sums are in float64: a baseline should not
depend on the order in which rows or ranks add. `ranks` is the data-parallel process group, for what is taken over the
whole rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import sum_over

GDPO_EPS = 1e-4


def group_mean_std(scores: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, std (ddof=1) and number of the valid samples of each row's group, as float64 [B] rows.

    std is exactly 0 where all valid scores of the group are equal, and where fewer than two are valid. A group
    without valid samples has mean 0.
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
    """Return the sum of x [B] over the rows of each row's group, [B]."""
    return torch.zeros_like(x).index_add(0, slot, x)[slot]


def _where_learnable(std: Tensor, valid: Tensor, advantage: Tensor) -> Tensor:
    return torch.where((std > 0) & valid.bool(), advantage, 0.0)


def learnable(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return bool [B]: valid, and the valid scores of the sample's group are not all equal. Scores [B, K] (NaN where
    the k-th does not apply to the sample) count if those of some column differ."""
    columns = scores[:, None] if scores.dim() == 1 else scores
    stds = [group_mean_std(column, group, valid.bool() & ~column.isnan())[1] for column in columns.unbind(1)]
    return (torch.stack(stds).amax(0) > 0) & valid.bool()


def count_degenerate(scores: Tensor, group: Tensor, valid: Tensor) -> tuple[int, int]:
    """Return (groups without gradient, all groups) among these rows; scores as in `learnable`."""
    total = torch.unique(group).numel()
    return total - torch.unique(group[learnable(scores, group, valid)]).numel(), total


def _standardised(scores: Tensor, group: Tensor, valid: Tensor, eps: float) -> Tensor:
    mean, std, _ = group_mean_std(scores, group, valid)
    return _where_learnable(std, valid, (scores.double() - mean) / (std + eps))


def grpo(scores: Tensor, group: Tensor, valid: Tensor, eps: float = 1e-6) -> Tensor:
    """Return (s - mean_G) / (std_G + eps), std with ddof=1. TRL's eps is 1e-4, OpenRLHF's 1e-9.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """
    return _standardised(scores, group, valid, eps).float()


def dr_grpo(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return s - mean_G; also the baseline of REINFORCE++-baseline. Source: "Understanding R1-Zero-like training",
    arXiv:2503.20783; arXiv:2501.03262."""
    mean, std, _ = group_mean_std(scores, group, valid)
    return _where_learnable(std, valid, scores.double() - mean).float()


def rloo(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return s_i - mean of the group's other valid samples = (s_i - mean_G) * n / (n - 1).

    Source: "Back to basics", arXiv:2402.14740. As samples that failed are invalid, it is also the RLOO-N of SkyRL's
    branch of Marin.
    """
    mean, std, count = group_mean_std(scores, group, valid)
    return _where_learnable(std, valid, (scores.double() - mean) * count / (count - 1).clamp_min(1)).float()


def maxrl(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return (s - mean_G) / mean_G, 0 where mean_G <= 0. With rewards of 0 and 1 the policy gradient is that of the
    likelihood of a right response, expanded to the order of the group's size: a prompt with pass rate p weighs 1 / p.

    Source: "Maximum likelihood reinforcement learning", arXiv:2602.02710.
    """
    mean, std, _ = group_mean_std(scores, group, valid)
    positive = mean > 0
    scaled = (scores.double() - mean) / torch.where(positive, mean, 1.0)
    return _where_learnable(std, valid, torch.where(positive, scaled, 0.0)).float()


def remax(scores: Tensor, greedy: Tensor, valid: Tensor) -> Tensor:
    """Return s - s(greedy response of the same prompt). greedy [B], NaN where the greedy response has no score: then
    0.

    No group is compared, so groups of one or of equal scores have an advantage too. Source: ReMax, arXiv:2310.10505.
    """
    known = valid.bool() & ~greedy.isnan()
    return torch.where(known, scores.double() - greedy.double(), 0.0).float()


def opo(scores: Tensor, group: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Return s - sum(len * s) / sum(len) over the group's valid samples; lengths [B], response tokens.

    It is the baseline of least variance where the gradient's norm grows with the length. Source: OPO,
    arXiv:2505.23585.
    """
    _, slot = torch.unique(group, return_inverse=True)
    _, std, _ = group_mean_std(scores, group, valid)
    weight = torch.where(valid.bool(), lengths.double(), 0.0)
    x = torch.where(valid.bool(), scores.double(), 0.0)
    baseline = _per_group(weight * x, slot) / _per_group(weight, slot).clamp_min(1)
    return _where_learnable(std, valid, x - baseline).float()


def gpg(scores: Tensor, group: Tensor, valid: Tensor, ranks: dist.ProcessGroup | None = None) -> Tensor:
    """Return (s - mean_G) * n / n_learnable: groups of the rollout (all ranks), and those of them with std > 0.

    A group counts if it has a valid sample. The factor is the paper's alpha = B / (B - M): degenerate groups are in
    the loss's denominator and have no gradient. Source: GPG, arXiv:2504.02546.
    """
    mean, std, _ = group_mean_std(scores, group, valid)
    counts = [torch.unique(group[valid.bool()]).numel(), torch.unique(group[std > 0]).numel()]
    total, left = sum_over(torch.tensor(counts, dtype=torch.float64, device=scores.device), ranks)
    return _where_learnable(std, valid, (scores.double() - mean) * (total / left.clamp_min(1))).float()


def gdpo(
    components: Tensor,
    weights: Sequence[float],
    group: Tensor,
    valid: Tensor,
    eps: float = 1e-6,
    ranks: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute x = sum_k w_k grpo(component k); return (x - mean) / (std + 1e-4) over the valid samples of the rollout
    (all ranks).

    components [B, K], NaN where component k does not apply to the sample: it is then in neither that component's
    group nor the sample's sum. std with ddof=1. A group is degenerate if it is in every component.

    Source: GDPO, arXiv:2601.05242; the constant is TRL's.
    """
    x = torch.zeros(len(group), dtype=torch.float64, device=components.device)
    for column, weight in zip(components.unbind(1), weights, strict=True):
        known = valid.bool() & ~column.isnan()
        x += weight * _standardised(column, group, known, eps)
    on = valid.bool()
    total, n = sum_over(torch.stack([x[on].sum(), on.sum().double()]), ranks)
    mean = total / n.clamp_min(1)
    square = sum_over((x[on] - mean).square().sum(), ranks)
    std = (square / (n - 1).clamp_min(1)).sqrt()
    return torch.where(learnable(components, group, valid), (x - mean) / (std + GDPO_EPS), 0.0).float()


def pass_at_k(scores: Tensor, group: Tensor, valid: Tensor, by_std: bool = False, eps: float = 1e-6) -> Tensor:
    """Return s_(1) - s_(2) for the best sample of the group, 0 for the others; with `by_std` divided by (std_G +
    eps).

    Source: "Optimizing language models for inference time objectives using RL", arXiv:2503.19595.
    """
    _, std, _ = group_mean_std(scores, group, valid)
    if not len(scores):
        return torch.zeros_like(scores, dtype=torch.float32)
    x = torch.where(valid.bool(), scores.double(), -torch.inf)
    order = torch.argsort(x, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # group by group, the best first
    label = group[order]
    best = torch.cat([torch.ones_like(label[:1], dtype=torch.bool), label[1:] != label[:-1]])
    ahead = torch.zeros_like(x)
    ahead[order[:-1]] = x[order[:-1]] - x[order[1:]]
    is_best = torch.zeros_like(valid, dtype=torch.bool)
    is_best[order[best]] = True
    advantage = ahead / (std + eps) if by_std else ahead
    return _where_learnable(std, valid.bool() & is_best, advantage).float()
