"""User buffers (`model.megatron.tp_comm_overlap`) without TransformerEngine: their memory, in place of its functions
that make them. No layer here has messages in them."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligner.megatron import transformer_engine
from aligner.rehearse.kernels import CUDA

GATHER, SCATTER = 8, 4  # messages of a layer that have a buffer each, which TransformerEngine's `initialize_ub` names


class UserBufferQuantizationMode(Enum):
    NONE, FP8 = "none", "fp8"


def install() -> None:
    """Install the patches, after Megatron's modules."""
    made: list[Tensor] = []

    def initialize_ub(shape: list[int], ranks: int, quantization_modes: list, dtype: torch.dtype, **how: Any) -> None:
        for mode in quantization_modes:
            gathered = torch.uint8 if mode is UserBufferQuantizationMode.FP8 else dtype
            for kind in [gathered] * GATHER + [dtype] * SCATTER:
                made.append(torch.empty(shape, dtype=kind, device=CUDA))

    base = SimpleNamespace(UserBufferQuantizationMode=UserBufferQuantizationMode, initialize_ub=initialize_ub)
    base.is_ub_initialized, base.destroy_ub = lambda: bool(made), made.clear
    sys.modules["transformer_engine.pytorch.module"] = SimpleNamespace(base=base)  # type: ignore[assignment]
    transformer_engine.lacks_buffers = lambda: ""
