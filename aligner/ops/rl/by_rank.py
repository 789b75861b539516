"""Values of other pairs that the sorting preference losses need (Melnyk et al. 2024, arXiv:2406.05882).

Over all pairs of the minibatch on all ranks, x_(k) the k-th smallest of x:

    aot           mean over k of l(beta (u_(k) - v_(k))), u = s_c - s_r of the policy's logprobs, v of the reference's
    aot_unpaired  mean over k of l(beta (a_(k) - b_(k))), a = g of the chosen, b = g of the rejected answers

A sort moves gradients as it moves values: the number of rank k has the gradient that l has to it while the number of
rank k on the other side is constant. With those constants, computed before the update, each pair has its own loss,
and micro-batches add up.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.preference import PreferenceConfig
from aligner.ops.reduce import gathered
from aligner.ops.rl.preference import Labels, measure, terms
from aligner.types import LabelTargets, TrainBatch


def at_rank(x: Tensor, others: Tensor) -> Tensor:
    """Return for each number of `x` [N] the one of `others` [N] of its rank; equal numbers rank in their order."""
    return others.sort().values[x.argsort(stable=True).argsort()]


def with_partners(batch: TrainBatch, logprobs: Tensor, c: PreferenceConfig, group: dist.ProcessGroup | None) -> Tensor:
    """Return labels [2B, 3 or 4] with the columns of `Labels.of` that `c.by_rank` reads, float32 [2B, 6]: counts, the
    shift of aot, and the number that aot_unpaired compares with the row's. logprobs [2B, T] are those of this rank's
    `batch` by the policy before the update. Collective over `group`, whose ranks may have different numbers of pairs.

    The shift is v_i - v_(k), k the rank of u_i: u_i - v_(k) is h_i, which is built token by token, plus the shift.
    """
    known, name = batch.of(LabelTargets), c.by_rank[0]
    labels = Labels.of(known.labels, c)
    own, reference = logprobs.double(), known.ref_logprobs.double()  # type: ignore[union-attr]
    sides = ((own, None), (reference, None), (own, reference))
    u, v, d = (terms(measure(x, other, batch.loss_mask, c.ld_alpha), labels, name, c) for x, other in sides)
    parts = gathered(torch.stack([u.h, v.h, d.chosen, d.rejected, labels.counts.double()]), group)
    before = sum(pairs.shape[1] for pairs in parts[: group.rank() if group is not None else 0])
    everyone = torch.cat(parts, 1)
    on = everyone[4] > 0
    policy, theirs, chosen, rejected = everyone[:4, on]
    peers = torch.zeros(3, len(on), dtype=everyone.dtype)
    peers[:, on] = torch.stack([theirs - at_rank(policy, theirs), at_rank(chosen, rejected), at_rank(rejected, chosen)])
    shift, *partners = peers[:, before : before + len(labels.counts)]
    columns = labels.counts.repeat_interleave(2), shift.repeat_interleave(2), torch.stack(partners, 1).flatten()
    return torch.cat([known.labels[:, :3], torch.stack(columns, 1).to(known.labels.dtype)], 1)
