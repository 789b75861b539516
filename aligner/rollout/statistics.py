"""The numbers a rollout reports, reduced over data-parallel ranks in one message."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.advantages import count_degenerate
from aligner.ops.mismatch import correction_sums, finish_mismatch, mismatch_sums
from aligner.ops.value_loss import explained_variance, explained_variance_sums
from aligner.rewards.composite import Scores, finish_metrics
from aligner.types import RolloutBatch, ScalarMetrics


def reduce_metrics(
    means: Mapping[str, tuple], maxima: Mapping[str, float], group: dist.ProcessGroup | None
) -> ScalarMetrics:
    """Sum numerators and denominators, take maxima, over `group`; 0/0 is NaN. Every rank passes the same names."""
    names, tops = list(means), list(maxima)
    sums = torch.tensor([[float(n), float(d)] for n, d in means.values()], dtype=torch.float64).reshape(-1, 2)
    highs = torch.tensor([float(maxima[name]) for name in tops], dtype=torch.float64)
    if group is not None and group.size() > 1:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        sums, highs = sums.to(device), highs.to(device)
        dist.all_reduce(sums, group=group)
        if tops:
            dist.all_reduce(highs, op=dist.ReduceOp.MAX, group=group)
    values = {name: n / d if d else math.nan for name, (n, d) in zip(names, sums.tolist(), strict=True)}
    return values | dict(zip(tops, highs.tolist(), strict=True))


def rollout_metrics(rollout: RolloutBatch, scores: Scores, group: dist.ProcessGroup) -> ScalarMetrics:
    """reward/*, response/*, advantage/*, mismatch/* and, with a reference, kl/ref_* of a whole rollout.

    Needs old_logprobs and loss_mask to be set; advantage/* only where there are advantages.
    """
    count, tokens = float(len(rollout.lengths)), rollout.response_mask.sum(1)
    degenerate, groups = count_degenerate(rollout.rewards.nan_to_num(), rollout.group, rollout.valid)
    assert rollout.old_logprobs is not None and rollout.loss_mask is not None
    on = rollout.loss_mask.bool()
    n = float(on.sum())
    means, maxima = mismatch_sums(
        rollout.old_logprobs,
        rollout.rollout_logprobs,
        rollout.response_mask,
        sampled_logprobs=rollout.sampled_logprobs,
    )
    means |= correction_sums(rollout.response_mask, rollout.token_weights, rollout.rejected)
    means = dict(means) | scores.metric_sums()
    if len(rollout.lengths) > groups:  # with one sample for each prompt nothing is compared, so nothing degenerate
        means["reward/degenerate_groups"] = (degenerate, groups)
    means |= {
        "response/tokens_mean": (tokens.sum(), count),
        "response/eos_fraction": (rollout.finished.sum(), count),
        "response/truncated_fraction": ((~rollout.finished).sum(), count),
    }
    if rollout.advantages is not None:
        advantage = rollout.advantages.double()[on]
        means |= {"advantage/mean": (advantage.sum(), n), "advantage/mean_square": (advantage.square().sum(), n)}
    if rollout.ref_logprobs is not None:
        means |= _kl_sums(rollout.old_logprobs - rollout.ref_logprobs, on)
    maxima = {name: float(v) for name, v in maxima.items()} | scores.metric_maxima()
    maxima["response/tokens_max"] = float(tokens.max()) if len(tokens) else 0.0
    return finish_mismatch(finish_metrics(reduce_metrics(means, maxima, group)))


def _kl_sums(d: Tensor, on: Tensor) -> dict[str, tuple[float, float]]:
    """Means over tokens of k1 and k3, and over sequences of k1's mean and sum over their tokens."""
    d = torch.where(on, d.double().clamp(-20, 20), 0.0)
    k3 = torch.where(on, torch.exp(-d) - 1 + d, 0.0)
    tokens, n, rows = on.sum(1), float(on.sum()), float(on.any(1).sum())
    return {
        "kl/ref_k1": (float(d.sum()), n),
        "kl/ref_k3": (float(k3.sum()), n),
        "kl/ref_k1_sequence_mean": (float((d.sum(1) / tokens.clamp_min(1)).sum()), rows),
        "kl/ref_k1_sequence_sum": (float(d.sum()), rows),
    }


def value_metrics(rollout: RolloutBatch, group: dist.ProcessGroup) -> ScalarMetrics:
    """critic/{value_mean,return_mean,explained_variance} of a whole rollout, from the values before the update."""
    assert rollout.values is not None and rollout.returns is not None and rollout.loss_mask is not None
    sums = explained_variance_sums(rollout.values, rollout.returns, rollout.loss_mask)
    sums = torch.cat([sums, (rollout.values.double() * rollout.loss_mask).sum()[None]])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    n = max(float(sums[0]), 1.0)
    return {
        "critic/explained_variance": explained_variance(sums[:5]),
        "critic/return_mean": float(sums[1]) / n,
        "critic/value_mean": float(sums[5]) / n,
    }
