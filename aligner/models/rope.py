"""Inverse frequencies of rotary embeddings, plain and scaled as in Llama 3.1; of local layers (Gemma 3) with their own
base."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aligner.config.schema import ModelConfig


def inverse_frequencies(cfg: ModelConfig, local: bool = False) -> Tensor:
    """float32 [head_dim / 2]: theta_i = base^(-2i/d) (Su et al. 2021, RoFormer, eq. 15).

    With `model.rope_scaling.factor` > 1 (Llama 3.1): wavelengths above original / low_freq_factor are slowed by the
    factor, those below original / high_freq_factor kept, those between interpolated. `local`: of layers with a
    window.
    """
    exponent = torch.arange(0, cfg.kv_channels, 2, dtype=torch.int64).float() / cfg.kv_channels
    own_base = cfg.attention.local_rope_base if local else 0.0
    frequency = 1.0 / ((own_base or cfg.rope_base) ** exponent)
    scaling = cfg.rope_scaling
    if scaling.factor == 1.0 or own_base:
        return frequency
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    slowed = torch.where(wavelength > original / low, frequency / scaling.factor, between)
    return torch.where(wavelength < original / high, frequency, slowed)
