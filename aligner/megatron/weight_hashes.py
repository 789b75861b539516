"""One number for each tensor of a model's weights, the same on every layout.

A rank hashes what it would write first of a checkpoint (`megatron/checkpoint.py`), at its position in the whole
tensor. So the sums over ranks do not depend on tensor, pipeline, expert and data parallelism. Of a model with
adapters only these are hashed, as the other weights do not change.
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
from aligner.megatron.weights import canonical_name, own_layers
from aligner.ops.kernels.hashes import odd_numbers, part_hash

ROW, COLUMN = 1, 2  # purposes for which odd numbers are drawn


@dataclass
class _Piece:
    name: str  # of the tensor
    data: Tensor  # a view of the weights
    rows: Tensor  # int64, the odd numbers of its rows and columns in the whole tensor
    columns: Tensor


class WeightHashes:
    """Hashes of this rank's share. Views of the weights are kept, as weights stay in place while the model lives."""

    def __init__(self, model: ShardedModel):
        layers = own_layers(model.module)
        self.pieces = [
            _piece(canonical_name(name, layers), leaf, model.cfg.vocab_size)
            for name, item in weight_state(model).items()
            for leaf in (nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item])
            if is_main_replica(leaf.replica_id)
        ]
        self.names = list(dict.fromkeys(piece.name for piece in self.pieces))

    def __call__(self) -> dict[str, Tensor]:
        """Return name -> int64 [], on the device: what this rank's part of the tensor adds to its hash. No messages."""
        sums: dict[str, Tensor] = {}
        for piece in self.pieces:
            own = part_hash(piece.data, piece.rows, piece.columns)
            sums[piece.name] = sums[piece.name] + own if piece.name in sums else own
        return sums


def _piece(name: str, leaf: ShardedTensor, vocab_size: int) -> _Piece:
    """Return a piece. The row of an element is its position along all axes but the last one."""
    data, shape = leaf.data.detach(), leaf.global_shape
    if leaf.allow_shape_mismatch:  # the vocabulary, padded with as many rows as tensor ranks need
        data = data[: max(0, vocab_size - leaf.global_offset[0])]
    local = (1,) * leaf.prepend_axis_num + tuple(data.shape)
    places = [np.arange(start, start + size) for start, size in zip(leaf.global_offset, local, strict=True)]
    strides = [prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
    rows = np.zeros(1, dtype=np.int64)
    for index, stride in zip(places, strides, strict=False):
        rows = (rows[:, None] + index * stride).reshape(-1)
    numbers = (odd_numbers(what, where).to(data.device) for what, where in ((ROW, rows), (COLUMN, places[-1])))
    return _Piece(name, data, *numbers)
