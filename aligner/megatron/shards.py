"""Shards of a model's checkpoint that a rank writes and reads: the numbers that its optimizer updates, as boxes of
the tensors they belong to.

The distributed optimizer (ZeRO-1) gives each data-parallel rank a range of numbers, which begins and ends anywhere in
a parameter. The parameter is itself a slice of a tensor, over tensor, expert and pipeline ranks. A range of a
row-major tensor is a few boxes (of a matrix at most three: a part of a row, whole rows, a part of a row). torch's
distributed checkpoints hold boxes with their offsets in the whole tensor. So nothing is gathered, and ranks of any
other layout read the numbers of their own boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from aligner.megatron.optimizer_state import OptimizerShard, is_distributed, owned

Shape = tuple[int, ...]


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield (offsets, sizes) of the fewest boxes that make up, in order, the numbers [start, stop) of a row-major
    tensor of this shape."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    inside = (0,) * (len(shape) - 1)
    if start < first * row:
        for offsets, sizes in boxes(shape[1:], start - (first - 1) * row, min(stop - (first - 1) * row, row)):
            yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *inside), (last - first, *shape[1:])
    if first <= last and last * row < stop:
        for offsets, sizes in boxes(shape[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *sizes)


def optimizer_shards(state: dict[str, Any], optimizer: MegatronOptimizer, main: str) -> dict[str, ShardedTensor]:
    """Return this rank's moments and float32 copies of weights, as views of them; the copies are called `main` in the
    file. `state` is the model's, by name. Float32 weights are in the model's own state."""
    items, shards = _by_param(state), []
    for own in owned(optimizer):
        item = items[id(own.param)][1]
        tensors = own.moments if own.param.dtype == own.main.dtype else {main: own.main, **own.moments}
        for name, tensor in tensors.items():
            shards += _pieces(item, own, tensor, f"optimizer.state.{name}.")
    return {str(i): piece for i, piece in enumerate(shards)}


def pieces(
    state: dict[str, Any], numbers: Iterable[tuple[OptimizerShard, Tensor]], prefix: str
) -> Iterator[ShardedTensor]:
    """Yield tensors parallel to what the optimizer owns, each in the boxes of its parameter, whose key gets a
    `prefix`."""
    items = _by_param(state)
    for own, tensor in numbers:
        yield from _pieces(items[id(own.param)][1], own, tensor, prefix)


def weight_shards(state: dict[str, Any], optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return the model's state to be written. Of parameters whose update data-parallel ranks share, it has this
    rank's part."""
    if not is_distributed(optimizer):
        return state
    items = _by_param(state)
    entries = {name: item for name, item in state.items() if not getattr(item.data, "requires_grad", False)}
    for own in owned(optimizer):
        name, item = items[id(own.param)]
        updated = own.param.detach().view(-1)[own.start : own.start + own.main.numel()]
        entries |= {f"{name}/{i}": piece for i, piece in enumerate(_pieces(item, own, updated, ""))}
    return entries


def _by_param(state: dict[str, Any]) -> dict[int, tuple[str, ShardedTensor | ShardedTensorFactory]]:
    return {id(item.data): (name, item) for name, item in state.items()}


def _pieces(
    item: ShardedTensor | ShardedTensorFactory, own: OptimizerShard, tensor: Tensor, prefix: str
) -> Iterator[ShardedTensor]:
    """Yield the boxes of what `own` has of a parameter, with the numbers of `tensor`. They lie in the whole tensor of
    which the parameter is a slice by `item` (or several slices, as gate and up are)."""
    flat, start, stop = tensor.detach().view(-1), own.start, own.start + tensor.numel()
    for leaf in nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]:
        shared = leaf.data.untyped_storage()._cdata == own.param.untyped_storage()._cdata
        assert shared and leaf.data.is_contiguous(), f"{leaf.key}: expected a range of its parameter"
        begin = leaf.data.storage_offset() - own.param.storage_offset()
        low, high = max(start, begin), min(stop, begin + leaf.data.numel())
        before, position = (1,) * leaf.prepend_axis_num, low - start
        for offsets, sizes in boxes(tuple(leaf.local_shape), low - begin, high - begin):
            count, inside = prod(sizes), (0,) * len(before) + offsets
            yield ShardedTensor(
                key=prefix + leaf.key,
                data=flat[position : position + count].view(before + sizes),
                dtype=tensor.dtype,
                local_shape=before + sizes,
                global_shape=leaf.global_shape,
                global_offset=tuple(a + b for a, b in zip(leaf.global_offset, inside, strict=True)),
                axis_fragmentations=None,  # no regular grid
                # copies over pipeline (tied embeddings) and tensor ranks; of data-parallel ones there is but this
                replica_id=(*leaf.replica_id[:2], 0) if own.alone else leaf.replica_id,
                allow_shape_mismatch=leaf.allow_shape_mismatch,
            )
            position += count
