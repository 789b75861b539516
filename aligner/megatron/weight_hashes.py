"""What weights a model has, told by one number for each tensor that is the same on every layout.

A rank hashes what of a checkpoint it would write first (`megatron/checkpoint.py`), at its place in the whole tensor; so
the sums over ranks know nothing of tensor, pipeline, expert and data parallelism. Of a model with adapters these are
hashed; the weights beside them do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from aligner.megatron.checkpoint import weight_state
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import canonical_name, first_layer
from aligner.ops.kernels.hashes import odd_numbers, part_hash

ROW, COLUMN = 1, 2  # what odd numbers are drawn for


@dataclass
class _Piece:
    name: str  # of the tensor
    data: Tensor  # a view of the weights
    rows: Tensor  # int64, the odd numbers of its rows and columns in the whole tensor
    columns: Tensor


class WeightHashes:
    """Of this rank's share; the weights stay where they are as long as the model lives, so views of them are kept."""

    def __init__(self, model: ShardedModel):
        first = first_layer(model.module)
        self.pieces = [
            _piece(canonical_name(name, first), leaf, model.cfg.vocab_size)
            for name, item in weight_state(model).items()
            for leaf in (nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item])
            if is_main_replica(leaf.replica_id)
        ]
        self.names = list(dict.fromkeys(piece.name for piece in self.pieces))

    def __call__(self) -> dict[str, Tensor]:
        """Name -> int64 [], on the device: what this rank's part of the tensor adds to its hash. No messages."""
        found: dict[str, Tensor] = {}
        for piece in self.pieces:
            own = part_hash(piece.data, piece.rows, piece.columns)
            found[piece.name] = found[piece.name] + own if piece.name in found else own
        return found


def _piece(name: str, leaf: ShardedTensor, vocab_size: int) -> _Piece:
    """The row of an element is its place along all axes but the last one."""
    data, shape = leaf.data.detach(), leaf.global_shape
    if leaf.allow_shape_mismatch:  # the vocabulary, padded with as many rows as tensor ranks need
        data = data[: max(0, vocab_size - leaf.global_offset[0])]
    local = (1,) * leaf.prepend_axis_num + tuple(data.shape)
    places = [np.arange(start, start + size) for start, size in zip(leaf.global_offset, local, strict=True)]
    strides = [prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
    rows = np.zeros(1, dtype=np.int64)
    for place, stride in zip(places, strides, strict=False):
        rows = (rows[:, None] + place * stride).reshape(-1)
    numbers = (odd_numbers(what, where).to(data.device) for what, where in ((ROW, rows), (COLUMN, places[-1])))
    return _Piece(name, data, *numbers)
