"""Pairs from a scored rollout: the best and the worst of each prompt's samples by reward."""

from __future__ import annotations

import torch
import torch.distributed as dist

from aligner.ops.reduce import reduce_metrics
from aligner.types import LabelTargets, RolloutBatch, ScalarMetrics, TrainBatch


def best_and_worst(rollout: RolloutBatch, group: int) -> TrainBatch:
    """Return this rank's P prompts, of `group` samples each, as 2P rows: chosen in rows 0, 2, 4.., rejected in rows 1,
    3, 5..; of equal rewards the sample drawn first. Needs token_rewards and loss_mask.

    labels [2P, 4]: the pair's margin (the difference of its rewards), the answer's reward, 1, and whether this is a
    pair: 0 where no two samples that count differ.
    """
    assert rollout.token_rewards is not None and rollout.loss_mask is not None
    rewards, counts = rollout.token_rewards.sum(1), rollout.loss_mask.bool().any(1)
    order = torch.argsort(rollout.group, stable=True).view(-1, group)
    each, known = rewards[order], counts[order]
    best = each.masked_fill(~known, -torch.inf).argmax(1, keepdim=True)
    worst = each.masked_fill(~known, torch.inf).argmin(1, keepdim=True)
    rows = torch.cat([order.gather(1, best), order.gather(1, worst)], 1).flatten()
    kept = rewards[rows]
    margin = kept[0::2] - kept[1::2]
    pair = known.any(1) & (margin > 0)
    per_row = [margin.repeat_interleave(2), kept, torch.ones_like(kept), pair.to(kept.dtype).repeat_interleave(2)]
    taken, labels = rollout.select(rows), torch.stack(per_row, 1)
    forks = taken.forks if taken.forks is not None and taken.forks.any() else None
    pairs = TrainBatch(
        taken.tokens, taken.lengths, taken.response_mask, [LabelTargets(labels)], routing=taken.routing, forks=forks
    )
    return pairs.trim()


def share_of_pairs(batch: TrainBatch, group: dist.ProcessGroup) -> ScalarMetrics:
    """Return preference/pairs: the share of prompts that make one."""
    pairs = batch.of(LabelTargets).labels[0::2, 3]
    return reduce_metrics({"preference/pairs": (float(pairs.sum()), float(len(pairs)))}, {}, group)
