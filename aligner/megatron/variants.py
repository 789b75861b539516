"""Modules of families whose layers Megatron's own cannot build: norms behind attention and MLP (Gemma 3,
arXiv:2503.19786), scaled embeddings."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from aligner.megatron.attention import GatedMLP, RMSNorm, StreamAttention


class NormedAttention(StreamAttention):
    """Its output is normalised before it is added to the residual stream."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(out), bias


class NormedMLP(GatedMLP):
    """Its output is normalised before it is added to the residual stream."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(out), bias


def scale_embeddings(embedding: torch.nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
    """Multiply what the module gives by sqrt(hidden_size), rounded to `dtype` as the family's authors do."""
    factor = float(torch.tensor(hidden_size**0.5, device="cpu").to(dtype))
    embedding.register_forward_hook(lambda module, inputs, output: output * factor)
