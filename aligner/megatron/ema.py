"""An exponential moving average of a model's weights, in float32.

Each rank averages the numbers that its optimizer updates, so the distributed optimizer shares the average out like its
own state, and nothing is sent. The model computes with its own weights: the average is written to checkpoints, and put
in their place for an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from aligner.megatron.optimizer_state import give_state, is_distributed, owned
from aligner.megatron.shards import pieces

if TYPE_CHECKING:
    from aligner.megatron.train import ShardedModel

EMA = "ema"  # before its tensors' keys in a checkpoint


class Ema:
    """mean <- decay * mean + (1 - decay) * weights after every optimizer step; the mean of no step is the weights."""

    def __init__(self, model: ShardedModel, decay: float):
        assert model.optimizer is not None, "a frozen model is its own average"
        give_state(model.optimizer)  # `owned` reads it
        self.model, self.decay = model, decay
        self.means: list[Tensor] = [own.main.detach().clone() for own in owned(model.optimizer)]

    @torch.no_grad()
    def update(self) -> None:
        for mean, own in zip(self.means, owned(self.model.optimizer), strict=True):
            mean.lerp_(own.main, 1 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from the current weights."""
        for mean, own in zip(self.means, owned(self.model.optimizer), strict=True):
            mean.copy_(own.main)

    def shards(self, state: dict[str, Any]) -> dict[str, ShardedTensor]:
        """Return this rank's part of the average, as views of it. `state` is the model's, by name."""
        both = zip(owned(self.model.optimizer), self.means, strict=True)
        return {str(i): piece for i, piece in enumerate(pieces(state, both, f"{EMA}."))}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average (rounded to the model's dtype) as the model's weights within the block, then restore its
        own. Collective over data-parallel ranks."""
        owner = list(owned(self.model.optimizer))
        parts = [own.param.detach().view(-1)[own.start : own.start + own.main.numel()] for own in owner]
        kept = [shard.clone() for shard in parts]
        self._put(parts, self.means)
        try:
            yield
        finally:
            self._put(parts, kept)

    def _put(self, parts: list[Tensor], numbers: list[Tensor]) -> None:
        for shard, number in zip(parts, numbers, strict=True):
            shard.copy_(number.view(-1))
        if is_distributed(self.model.optimizer):  # each has its share of the new weights, as after a step
            self.model.wrapped.start_param_sync()
