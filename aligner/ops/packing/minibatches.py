"""Assignment of a rollout's rows to minibatches, without messages to other ranks.

The members of a global minibatch must not depend on the number of data-parallel ranks, and every rank must have the
same number of rows in each minibatch. Both follow from dealing rows by their prompt slot:

With group size G and M minibatches, cut the prompt slots of the rollout into blocks of k = M / gcd(M, G) consecutive
slots, the smallest number whose k * G rows deal out evenly. Shuffle the rows of each block by a seed of (epoch,
block) and deal them round-robin: k * G / M rows to every minibatch. So a row's minibatch depends only on its slot,
its position in its group and the epoch. A rank with n prompts gets equal parts exactly if its slots are whole blocks.
For contiguous slices of n prompts per rank, starting at a multiple of n, that is: M divides n * G, the rows of a
rank.

(Dealing within single prompts would be simpler, but with G < M it would repeat the same minibatches in every epoch.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from aligner.errors import ConfigError


def minibatch_rows(groups: Tensor, group_size: int, minibatches: int, epoch_seed: int) -> list[Tensor]:
    """Split this rank's rows into `minibatches` equal parts; each an ascending int64 [B / minibatches] of row
    numbers.

    groups int64 [B]: the global prompt slot of each local row; a slot's `group_size` rows are all here, in the order
    of their sample index. epoch_seed: a new one for each rollout and epoch, the same on all ranks, in [0, 2^64).
    Raises ConfigError if the parts would not be equal.
    """
    slots = groups.detach().cpu().numpy()
    position = places(groups, group_size)
    if len(slots) % minibatches:
        raise _uneven(len(slots), group_size, minibatches)
    per_block = minibatches // math.gcd(minibatches, group_size)
    block = slots // per_block
    inside = (slots % per_block) * group_size + position
    minibatch = np.empty(len(slots), dtype=np.int64)
    for b in np.unique(block):
        # raw bits, not Generator.permutation: numpy promises a stable stream for the former only
        draws = np.random.Philox(key=np.array([epoch_seed, b], dtype=np.uint64)).random_raw(per_block * group_size)
        dealt = np.empty(len(draws), dtype=np.int64)
        dealt[np.argsort(draws, kind="stable")] = np.arange(len(draws)) % minibatches
        rows = block == b
        minibatch[rows] = dealt[inside[rows]]
    if len(set(np.bincount(minibatch, minlength=minibatches).tolist())) > 1:
        raise _uneven(len(slots), group_size, minibatches)
    return [torch.from_numpy(np.flatnonzero(minibatch == m)) for m in range(minibatches)]


def places(groups: Tensor, group_size: int) -> np.ndarray:
    """Return int64 [B]: the position of each row among the rows of its slot. groups as in `minibatch_rows`."""
    slots = groups.detach().cpu().numpy()
    labels, counts = np.unique(slots, return_counts=True)
    assert (counts == group_size).all(), f"rows per prompt slot {sorted(set(counts.tolist()))}, group={group_size}"
    position = np.empty(len(slots), dtype=np.int64)
    position[np.argsort(slots, kind="stable")] = np.tile(np.arange(group_size), len(labels))
    return position


def _uneven(rows: int, group_size: int, minibatches: int) -> ConfigError:
    per_block = minibatches // math.gcd(minibatches, group_size)
    return ConfigError(
        "batch.minibatch_samples",
        round(rows / minibatches, 3),
        f"a size per data-parallel rank that cuts its {rows} rows ({rows // group_size} prompts x group {group_size}) "
        f"into {minibatches} equal minibatches",
        f"With {minibatches} minibatches and batch.group={group_size}, the prompts of every rank must be a multiple of "
        f"{per_block}.",
    )
