"""Modules of families whose layers Megatron's own cannot build: norms after attention and MLP (Gemma 3,
arXiv:2503.19786), scaled embeddings and layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from aligner.megatron.attention import GatedMLP, StreamAttention
from aligner.megatron.moe import StreamLayer
from aligner.megatron.sharing import LayerConfig, checkpoint_entries


class _NormedOutput:
    """Base of a module whose output is normalised before it is added to the residual stream."""

    def __init__(self, config: LayerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = config.norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.post_layernorm(out), bias


class NormedAttention(_NormedOutput, StreamAttention):
    pass


class NormedMLP(_NormedOutput, GatedMLP):
    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Add the norm with this model's process groups; Megatron's method uses the global ones."""
        at = f"{prefix}post_layernorm."
        norm = checkpoint_entries(self.post_layernorm, at, sharded_offsets, metadata, self.tp_group)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | norm


class ScaledLayer(TransformerLayer):
    """A layer whose output is multiplied by `layer_scalar` [1]; no gradient changes it."""

    def __init__(self, config: LayerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.layer_scalar = torch.nn.Parameter(torch.ones(1, dtype=config.params_dtype), requires_grad=False)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._forward_mlp(*args, **kwargs) * self.layer_scalar


class ScaledStreamLayer(ScaledLayer, StreamLayer):
    pass


def scale_embeddings(embedding: torch.nn.Module, factor: float) -> None:
    """Multiply the module's output."""
    embedding.register_forward_hook(lambda module, inputs, output: output * factor)
