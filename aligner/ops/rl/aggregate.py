"""From a per-token loss to the loss of a minibatch, however it is cut into micro-batches and data-parallel ranks.

The denominator is computed once, over the whole minibatch; every micro-batch divides its own sum by it, and the sums
over micro-batches and ranks then ARE the minibatch loss. With n rows that have a masked token, x the loss, m the mask:

    token_mean               sum_it(m x) / sum_it(m)
    seq_mean_token_mean      sum_i(sum_t(m x) / sum_t(m)) / n
    seq_mean_token_sum       sum_it(m x) / n
    seq_mean_token_sum_norm  sum_it(m x) / (n * length), a constant length (Dr. GRPO, arXiv:2503.20783)

Rows without masked tokens count in neither numerator nor denominator.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import sum_over

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def denominator(mask: Tensor, kind: str, length: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the minibatch's denominator, a float32 scalar: mask [B, T] of all this rank's rows, summed over `group`.

    `length` (tokens) is the constant of `seq_mean_token_sum_norm` and unused by the others. 0 if nothing is masked
    in.
    """
    assert kind in AGGREGATIONS, f"aggregation {kind!r}"
    on = mask.bool()
    count = on.sum() if kind == "token_mean" else on.any(1).sum()
    total = sum_over(count.double(), group)
    if kind == "seq_mean_token_sum_norm":
        assert length > 0, f"{kind} needs a length above 0, not {length}"
        total = total * length
    return total.float()


def aggregate(per_token: Tensor, mask: Tensor, kind: str, denominator: Tensor) -> Tensor:
    """Return this micro-batch's share of the minibatch loss, a scalar: per_token and mask [b, T], from
    `denominator()`.

    A denominator of 0 gives loss 0.
    """
    assert kind in AGGREGATIONS, f"aggregation {kind!r}"
    on = mask.bool()
    # where, not a product: what a padding token's loss is must not matter, not even if it is inf
    x = torch.where(on, per_token.float(), 0.0)
    if kind == "seq_mean_token_mean":
        x = x.sum(1) / on.sum(1).clamp_min(1)
    return x.sum() / denominator.clamp_min(1)
