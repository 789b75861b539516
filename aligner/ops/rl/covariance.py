"""Tokens that move the policy's entropy most, and the choice among them (Clip-Cov and KL-Cov, arXiv:2505.22617).

Both cover a whole minibatch, over all its micro-batches and data-parallel ranks, so they are computed once, before it
is cut. A random choice orders tokens by a hash of their identity (`token_keys`), never by their position in the
batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from aligner.ops.reduce import sum_over
from aligner.ops.seeds import scatter

LAST_KEY = torch.iinfo(torch.int64).max


def token_keys(row_keys: Tensor, width: int) -> Tensor:
    """Return int64 [B, width] >= 0: a hash of each token's row key (int64 [B]) and its index in the row."""
    rows = row_keys.cpu().numpy().astype(np.uint64)[:, None]
    return torch.from_numpy((scatter(rows, np.arange(width, dtype=np.uint64)) >> np.uint64(1)).astype(np.int64))


@torch.no_grad()
def covariance(
    advantages: Tensor, old_logprobs: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return (A - mean A) (lp - mean lp), float64 [B, T], 0 where mask is 0; means over the masked tokens of `group`.
    It uses the old logprobs, which a minibatch has before it is cut into micro-batches; veRL takes the current ones.
    """
    on = mask.bool()
    a, lp = (torch.where(on, x.double(), 0.0) for x in (advantages, old_logprobs))
    total_a, total_lp, n = sum_over(torch.stack([a.sum(), lp.sum(), on.sum().double()]), group).unbind()
    n = n.clamp_min(1)
    return torch.where(on, (a - total_a / n) * (lp - total_lp / n), 0.0)


@torch.no_grad()
def choose_random(
    cov: Tensor,
    mask: Tensor,
    keys: Tensor,
    fraction: float,
    low: float,
    high: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return float32 [B, T]: 1 on a random `fraction` of the tokens of `group` (at least one), among those with low <
    cov < high, or on all of these if they are fewer. keys int64 [B, T] order the tokens."""
    candidates = mask.bool() & (cov > low) & (cov < high)
    return _first(torch.zeros_like(cov), keys, candidates, _count(mask, fraction, group), group)


@torch.no_grad()
def choose_top(
    cov: Tensor, mask: Tensor, keys: Tensor, fraction: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return float32 [B, T]: 1 on the `fraction` of the tokens of `group` (at least one) of the largest cov; keys
    int64 [B, T] decide between equal ones."""
    return _first(-cov, keys, mask.bool(), _count(mask, fraction, group), group)


def _count(mask: Tensor, fraction: float, group: dist.ProcessGroup | None) -> int:
    return max(1, int(fraction * float(sum_over(mask.bool().sum().double(), group))))


def _first(order: Tensor, keys: Tensor, on: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return 1 on the `count` tokens that come first by (order, key) among those that are `on`, over all ranks."""
    first, second = _sorted(order[on], keys[on], count)
    missing = count - len(first)
    first = torch.nn.functional.pad(first, (0, missing), value=torch.inf)
    second = torch.nn.functional.pad(second, (0, missing), value=LAST_KEY)
    if group is not None and group.size() > 1:
        of_ranks = [[torch.empty_like(x) for _ in range(group.size())] for x in (first, second)]
        for parts, local in zip(of_ranks, (first, second), strict=True):
            dist.all_gather(parts, local, group=group)
        first, second = _sorted(*(torch.cat(parts) for parts in of_ranks), count)
    before = (order < first[-1]) | ((order == first[-1]) & (keys <= second[-1]))
    return (on & before).float()


def _sorted(first: Tensor, second: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` smallest pairs."""
    places = torch.argsort(second, stable=True)
    places = places[torch.argsort(first[places], stable=True)][:count]
    return first[places], second[places]
