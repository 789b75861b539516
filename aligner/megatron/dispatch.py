"""Tokens to the ranks that have their experts, and sums of the experts' outputs back.

Experts are divided among the ranks of a group, or among nodes first and then among the ranks of each: `groups`, the
outermost first. A token goes once to each rank of the first group that has one of its experts, with all its weights
and experts. From there it goes on in the next group, and from the last one to the experts of its rank. On the way back
each rank adds up what it got for a token, so one row returns for each that was sent. Over the network between nodes
one copy of a token goes to a node, not one for each expert there.

The host must know how many rows come. Ranks tell each other for all groups at once, and the host waits once in a
forward pass, behind work that needs no other ranks. Backward and a recomputed layer use the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.megatron.collectives import all_to_all
from aligner.ops.kernels.experts import add_up, combine, expand, order_pairs, sort_pairs

Groups = Sequence[dist.ProcessGroup]


def exchange_sizes(experts: Tensor, num_experts: int, groups: Groups) -> Callable[[], list[int]]:
    """Exchange the numbers of rows. The result waits for them and returns, for each group, those sent to each of its
    ranks and those that each sends; then the number of pairs of this rank's experts."""
    ranks = prod(group.size() for group in groups)
    each, counts, parts = experts.new_zeros(len(experts), ranks), [], 1
    each = each.scatter_add_(1, experts // (num_experts // ranks), torch.ones_like(experts))
    for group in groups:
        parts *= group.size()
        counts.append(each.unflatten(1, (parts, -1)).any(2).sum(0))
    counts, sizes = [*counts, each.sum(0)], []
    for group in groups:
        sent = torch.cat([count.view(group.size(), -1) for count in counts], 1)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        sizes += [sent[:, 0], got[:, 0]]
        counts = list(got[:, 1:].sum(0).split([count.numel() // group.size() for count in counts[1:]]))
    there = torch.cat([*sizes, *counts]).to("cpu", non_blocking=True)
    if not experts.is_cuda:
        return there.tolist
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[int]:
        event.synchronize()
        return there.tolist()

    return wait


def through(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    groups: Groups,
    sizes: Sequence[int],
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Compute x [N, width] by experts int64 [N, k] of all ranks, weighted by float32 [N, k] -> [N, width]. `compute`
    gets this rank's rows by expert, and the number of each. `sizes` are those of `exchange_sizes`."""
    top_k = experts.shape[1]
    if not groups:
        pairs, counts = sort_pairs(experts, num_experts, sizes[0])
        return combine(compute(expand(x, pairs), counts), pairs, weights)
    group, ranks = groups[0], groups[0].size()
    sent, got = list(sizes[:ranks]), list(sizes[ranks : 2 * ranks])
    share = num_experts // ranks
    there = torch.zeros(len(x), ranks + 1, dtype=torch.bool, device=x.device)
    there = there.scatter_(1, experts // share, True)[:, :ranks]
    copies, _ = order_pairs(torch.arange(ranks, device=x.device).where(there, ranks), sum(sent))
    chosen = expand(torch.cat([weights, experts.float()], 1), copies)
    x = all_to_all(expand(x, copies), sent, got, group)
    weights, chosen = all_to_all(chosen, sent, got, group).split(top_k, 1)
    own = chosen.long() - group.rank() * share
    own = own.where(own // share == 0, share)
    out = through(x, weights, own, share, groups[1:], sizes[2 * ranks :], compute)
    return add_up(all_to_all(out, got, sent, group), copies)
