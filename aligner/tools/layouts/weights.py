"""Random weights of tiny models, in which a mix-up shows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.models.params import ParamSpec

if TYPE_CHECKING:
    from aligner.megatron.weights import WeightSource


def norm_middle(cfg: ModelConfig, name: str) -> float:
    """Return the weight with which the norm, or the scalar, of that name, in Megatron or in files, multiplies by 1."""
    of_linear_attention = "out_norm" in name or "linear_attn.norm" in name
    return 0.0 if cfg.traits.offset_norms and not of_linear_attention else 1.0


def wild_source(cfg: ModelConfig, seed: int = 0) -> WeightSource:
    """Return random weights by name, with distributions far from uniform and no constants that would hide a
    mix-up."""

    def source(spec: ParamSpec) -> Tensor:
        word = hashlib.sha256(f"{seed}/{spec.canonical}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(word[:6], "big"))
        if spec.integer:
            return torch.randint(4, spec.shape, generator=generator)
        noise = torch.randn(spec.shape, generator=generator)
        multiplies = "norm" in spec.canonical or "scalar" in spec.canonical
        return 0.2 * noise + (norm_middle(cfg, spec.canonical) if multiplies else 0.0)

    return source
