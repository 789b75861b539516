"""Megatron's linear layers with products of one shape (`model.kernels=invariant`). On a GPU products are those of
Megatron's batch-invariant mode, in all of this process."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError
from aligner.ops.kernels.invariant import linear


def use_invariant_products(model: ModelConfig, device: torch.device) -> None:
    """Let this process compute products and log-softmax on a GPU so, for good. Not run on a GPU. Raises ConfigError
    where Megatron's module for it cannot be imported, and for experts, whose rows the host would have to count."""
    if device.type == "cuda":
        if model.moe.num_experts:
            raise ConfigError("model.kernels", "invariant", "own on a GPU for a model with experts")
        try:
            import transformer_engine.pytorch  # noqa: F401 (which Megatron's module patches, after torch's products)
            from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels
        except ImportError as error:
            expected = "own on a GPU without TransformerEngine and Triton, by which Megatron-Core computes that way"
            raise ConfigError("model.kernels", "invariant", expected, str(error)) from error
        kernels.enable_batch_invariant_mode()


class InvariantColumn(ColumnParallelLinear):
    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **unused: Any) -> Tensor:
        return linear(input, weight, bias)


class InvariantRow(RowParallelLinear):
    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **unused: Any) -> Tensor:
        return linear(input, weight, bias)
