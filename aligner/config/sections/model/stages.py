"""Which layers each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Protocol


class LayoutSizes(Protocol):
    """A `Layout`, a `ParallelConfig`, or the `Grid` of a plan."""

    tensor: int
    pipeline: int
    virtual_stages: int
    context: int
    expert: int
    stage_layers: Sequence[int]


@cache
def cut(layers: int, stages: int, sizes: tuple[int, ...] = (), shared: tuple[int, ...] = ()) -> tuple[range, ...]:
    """Return the layers of each stage. Without `sizes` that add up to them, those that do not divide make stages in the
    middle longer, and a stage that would begin with one of `shared` begins with the nearest other layer."""
    if sum(sizes) == layers and len(sizes) == stages:
        return tuple(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))
    each, longer = divmod(layers, stages)
    first = (stages - longer + 1) // 2  # stages before those that have one more
    free, begins = [layer for layer in range(layers) if layer not in shared], [0]
    for stage in range(1, stages):
        even = stage * each + min(longer, max(0, stage - first))
        left = [layer for layer in free[stage : len(free) - stages + stage + 1] if layer > begins[-1]]
        begins.append(min(left, key=lambda layer: abs(layer - even)))
    return tuple(range(*ends) for ends in pairwise([*begins, layers]))
