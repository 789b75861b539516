"""The metrics of a rollout, reduced over data-parallel ranks in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.answers import CAUSES
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.ops.reduce import of_each_rank, reduce_metrics
from aligner.ops.rl.advantages import count_degenerate
from aligner.ops.rl.kl import reference_kl_sums
from aligner.ops.rl.mismatch import cut_sums, finish_mismatch, mismatch_sums, weight_sums
from aligner.ops.rl.value_loss import explained_variance, explained_variance_sums
from aligner.rewards.composite import Scores, finish_metrics
from aligner.types import PolicyTargets, RolloutBatch, Sample, ScalarMetrics, Stop, Sums


def by_function(scores: Scores) -> Tensor:
    """Return float64 [B, K], NaN where a function does not apply."""
    columns = [[math.nan if v is None else v for v in column] for column in scores.components.values()]
    return torch.tensor(columns, dtype=torch.float64).reshape(len(columns), -1).T


def compared(rollout: RolloutBatch, scores: Scores, algorithm: AlgorithmConfig) -> Tensor:
    """Return the numbers that must differ within a group for it to train: the shaped rewards [B] if there are any;
    with gdpo, which standardises each function's scores separately, those scores."""
    if algorithm.advantage == "gdpo":
        return by_function(scores)
    return rollout.rewards.nan_to_num() if rollout.token_rewards is None else rollout.token_rewards.sum(1)


def rollout_metrics(
    rollout: RolloutBatch, scores: Scores, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> ScalarMetrics:
    """Return reward/*, response/*, advantage/*, mismatch/* and, with a reference, kl/ref_* of a whole rollout.

    Needs loss_mask to be set. advantage/* only where there are advantages; mismatch/* of the trainer and kl/ref_*
    only where there are old_logprobs, else the policy's update has them.
    """
    count, tokens = float(len(rollout.lengths)), rollout.response_mask.sum(1)
    degenerate, groups = count_degenerate(compared(rollout, scores, algorithm), rollout.group, rollout.valid)
    assert rollout.loss_mask is not None
    on = rollout.loss_mask.bool()
    n = float(on.sum())
    means, maxima = {}, {}
    if rollout.old_logprobs is not None:
        means, maxima = trainer_sums(rollout, rollout.old_logprobs, rollout.loss_mask)
    if rollout.sampled_logprobs is not None:
        means |= cut_sums(rollout.rollout_logprobs, rollout.sampled_logprobs, rollout.response_mask)
    means |= weight_sums(rollout.response_mask, rollout.token_weights)
    means["mismatch/rejected_fraction"] = (0.0 if rollout.rejected is None else rollout.rejected.sum(), count)
    means |= scores.metric_sums()
    if len(rollout.lengths) > groups:  # with one sample for each prompt no group is degenerate
        means["reward/degenerate_groups"] = (degenerate, groups)
    means |= {
        "response/tokens_mean": (tokens.sum(), count),
        "response/eos_fraction": (rollout.finished.sum(), count),
        "response/truncated_fraction": ((~rollout.finished).sum(), count),
    }
    if rollout.advantages is not None:
        advantage = rollout.advantages.double()[on]
        means |= {"advantage/mean": (advantage.sum(), n), "advantage/mean_square": (advantage.square().sum(), n)}
    maxima = {name: float(v) for name, v in maxima.items()} | scores.metric_maxima()
    maxima["response/tokens_max"] = float(tokens.max()) if len(tokens) else 0.0
    return finish_mismatch(finish_metrics(reduce_metrics(means, maxima, group)))


def trainer_sums(rows: RolloutBatch | PolicyTargets, old_logprobs: Tensor, loss_mask: Tensor) -> tuple[dict, dict]:
    """Return (means, maxima), as in `LossOutput`, of the policy's logprobs before the update: mismatch/* and, with a
    reference, kl/ref_*."""
    means, maxima = mismatch_sums(old_logprobs, rows.rollout_logprobs, rows.response_mask)
    if rows.ref_logprobs is not None:
        means |= reference_kl_sums(old_logprobs, rows.ref_logprobs, loss_mask)
    return means, maxima


def staleness_metrics(rollout: RolloutBatch, version: int, group: dist.ProcessGroup | None) -> ScalarMetrics:
    """Return staleness/{mean,max}: optimizer steps between the weights that made a response token and the policy's,
    `version`. Where tokens of a sample have several: also `staleness/oldest_mean`, the mean over samples of their
    oldest token's, and `staleness/q1_mean` ... `q4_mean`, the mean over the tokens of each quarter of the samples,
    the shortest first: samples that finish first are short, and long ones are old."""
    if rollout.versions is None:
        lag = float(version - rollout.weight_version)
        return {"staleness/mean": lag, "staleness/max": lag}
    on = rollout.response_mask.bool()
    age = torch.where(on, version - rollout.versions, 0).double()
    tokens, total, oldest = on.sum(1).double(), age.sum(1), age.amax(1)
    lengths = torch.cat(of_each_rank(tokens, group))
    first = (0 if group is None else group.rank()) * len(tokens)
    rank = lengths.argsort(stable=True).argsort()[first : first + len(tokens)]
    means = {"staleness/mean": (total.sum(), tokens.sum()), "staleness/oldest_mean": (oldest.sum(), len(oldest))}
    for quarter in range(4):
        chosen = rank * 4 // len(lengths) == quarter
        means[f"staleness/q{quarter + 1}_mean"] = total[chosen].sum(), tokens[chosen].sum()
    return reduce_metrics(means, {"staleness/max": float(oldest.max())}, group)


def value_metrics(rollout: RolloutBatch, group: dist.ProcessGroup) -> ScalarMetrics:
    """Return critic/{value_mean,return_mean,explained_variance} of a whole rollout, from the values before the
    update."""
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


def trajectory_sums(samples: Sequence[Sample]) -> tuple[Sums, dict[str, float]]:
    """Return stop/<reason>, environment/*: sums to be divided and maxima. Some samples may be no trajectories."""
    trajectories = [sample.trajectory for sample in samples if sample.trajectory is not None]
    n = float(len(trajectories))
    sums = {f"stop/{stop}": (float(sum(t.stop == stop for t in trajectories)), n) for stop in Stop}
    sums |= {
        f"environment/failed_{cause}": (float(sum(t.failure.startswith(f"{cause}:") for t in trajectories)), n)
        for cause in CAUSES
    }
    sums |= {
        "environment/failed": (float(sum(bool(t.failure) for t in trajectories)), n),
        "environment/turns_mean": (float(sum(t.turns for t in trajectories)), n),
        "environment/rows_mean": (float(sum(t.rows for t in trajectories)), n),
        "environment/call_errors": (float(sum(t.wrong for t in trajectories)), n),
        "environment/retried": (float(sum(t.retried for t in trajectories)), n),
        "environment/late": (float(sum(t.late for t in trajectories)), n),
        "environment/restarted": (float(sum(t.restarted for t in trajectories)), n),
    }
    return sums, {"environment/turns_max": float(max((t.turns for t in trajectories), default=0))}
