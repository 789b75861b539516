"""The engine's choice of experts for each token, on the way to the trainer, which repeats it (rollout routing replay,
arXiv:2510.11370).

`routing` [B, T, layers, top_k] lies beside `tokens` [B, T]. It covers the layers with experts, and all tokens but the
last of each row, which no engine is fed and which predicts nothing. There, and on padding, it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig

if TYPE_CHECKING:
    from aligner.ops.packing.pack import Packing


def routing_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype that holds the experts' numbers."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def no_routing(model: ModelConfig) -> Tensor:
    """Return the routing of no rows."""
    layers = len(model.layers_of("sparse"))
    return torch.empty(0, 0, layers, model.moe.top_k, dtype=routing_dtype(model.moe.num_experts))


def widened(t: Tensor, width: int, value: int = 0) -> Tensor:
    """Cut or pad [B, T, ...] -> [B, width, ...]."""
    missing = width - t.shape[1]
    return torch.nn.functional.pad(t, (*(0, 0) * (t.dim() - 2), 0, missing), value=value) if missing else t


@dataclass(frozen=True)
class RoutingReplay:
    """Expert choices for the n tokens of a stream that are not padding, in the layers of this pipeline stage."""

    experts: Tensor  # uint8 or int16 [layers, n, k]
    known: Tensor  # bool [n]; False: the last token of a row, which goes where the trainer's router sends it

    @classmethod
    def of(cls, packing: Packing, routing: Tensor, lengths: Tensor, tokens: Tensor) -> RoutingReplay:
        """Make it of routing [B, T, layers, k] and lengths int64 [B] of the micro-batch, for `tokens` int64 [n] of the
        stream."""
        source, positions = packing.source[tokens], packing.positions[tokens]
        experts = routing.flatten(0, 1)[source].transpose(0, 1).contiguous()
        return cls(experts, positions < lengths[source // packing.width] - 1)
