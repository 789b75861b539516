"""Inverse frequencies of rotary embeddings, plain and scaled; local layers (Gemma 3) have their own base.

Every kind of scaling is a function of the config in `_SCALED`, and gives frequencies that hold for all rows of a run:
- dynamic (NTK by the row's length): rows up to `model.max_position` are not scaled, and longer ones are refused, since
  their angles would change with the longest row beside them and with every token that is generated.
- longrope: one of its two lists for all rows, so that keys in a cache, rows of a micro-batch, trainer and engine agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig

INDEX_EPS = 1e-6  # of the norms of indexers' keys
LATENT_EPS = 1e-6  # of the norms of latent vectors, independent of `model.norm_eps`


def inverse_frequencies(cfg: ModelConfig, local: bool = False) -> Tensor:
    """Return float32 [rotary_dim / 2]: theta_i = base^(-2i/d) (Su et al. 2021, RoFormer, eq. 15).

    They are scaled by `model.rope_scaling`. `local`: of layers with a window, whose own base is not scaled.
    """
    own_base = cfg.attention.local_rope_base if local else 0.0
    cfg = cfg.of_kinds(("local" if local else "global",)) if cfg.traits.global_heads else cfg
    periods = (own_base or cfg.rope_base) ** _exponents(cfg)
    if own_base or not cfg.rope_scaling.scales:
        return 1.0 / periods
    return _SCALED[cfg.rope_scaling.type](cfg, periods)


def attention_factor(cfg: ModelConfig, local: bool = False) -> float:
    """Return the multiplier of cosines and sines.

    YaRN (arXiv:2309.00071, section 3.4) and LongRoPE (arXiv:2402.13753) sharpen attention with it.
    """
    scaling = cfg.rope_scaling
    if (local and cfg.attention.local_rope_base) or not scaling.scales:
        return 1.0
    if scaling.type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.type == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def query_factors(cfg: ModelConfig, positions: Tensor) -> Tensor | None:
    """Return the factors of queries at these positions, if they have some: attention to long rows is sharpened."""
    beta, length = cfg.rope_scaling.llama_4_scaling_beta, cfg.rope_scaling.original_max_position
    return 1 + beta * (positions // length).float().log1p() if beta else None


def score_scale(cfg: ModelConfig) -> float | None:
    """Return the scale of attention scores; None: 1 / sqrt(head_dim).

    With latent attention, a scaling with `mscale_all_dim` sharpens the scores, not only cosines and sines
    (DeepSeek-V3's modeling files).
    """
    scaling = cfg.rope_scaling
    if cfg.traits.plain_scores:
        return 1.0
    if not (cfg.latent.kv_rank and scaling.scales and scaling.mscale_all_dim):
        return cfg.attention.scale
    return cfg.kv_channels**-0.5 * _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _exponents(cfg: ModelConfig) -> Tensor:
    return torch.arange(0, cfg.rotary_dim, 2, dtype=torch.int64).float() / cfg.rotary_dim


def _llama3(cfg: ModelConfig, periods: Tensor) -> Tensor:
    """Scale frequencies as Llama 3.1.

    Wavelengths above original / low_freq_factor are slowed by the factor, those below original / high_freq_factor kept,
    those between interpolated.
    """
    scaling, frequency = cfg.rope_scaling, 1.0 / periods
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    slowed = torch.where(wavelength > original / low, frequency / scaling.factor, between)
    return torch.where(wavelength < original / high, frequency, slowed)


def _linear(cfg: ModelConfig, periods: Tensor) -> Tensor:
    """Divide positions by the factor (arXiv:2306.15595)."""
    return 1.0 / periods / cfg.rope_scaling.factor


def _dynamic(cfg: ModelConfig, periods: Tensor) -> Tensor:
    """Return unscaled frequencies, valid within `model.max_position`."""
    return 1.0 / periods


def _yarn(cfg: ModelConfig, periods: Tensor) -> Tensor:
    """Scale frequencies by YaRN (arXiv:2309.00071, eq. 22).

    Dimensions that turn more than beta_fast times over the original context are kept, those below beta_slow turns
    interpolated, with a ramp between.
    """
    scaling, dim = cfg.rope_scaling, 2 * len(periods)

    def dimension(turns: float) -> float:
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(cfg.rope_base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(len(periods), dtype=torch.float32) - low) / width).clamp(0, 1)
    return slowed / (scaling.factor * periods) + (1 - slowed) / periods


def _longrope(cfg: ModelConfig, periods: Tensor) -> Tensor:
    """Divide each frequency by its own searched number (arXiv:2402.13753)."""
    scaling = cfg.rope_scaling
    long = scaling.factors == "long" or (scaling.factors == "auto" and cfg.max_position > scaling.original_max_position)
    return 1.0 / (torch.tensor(scaling.long_factor if long else scaling.short_factor) * periods)


def _proportional(cfg: ModelConfig, periods: Tensor) -> Tensor:
    """Rotate the first pairs alone: the others have frequency 0. Pairs are of the whole head."""
    turning = torch.arange(len(periods)) < int(cfg.attention.rotary_fraction * cfg.kv_channels // 2)
    return turning / periods / cfg.rope_scaling.factor


_SCALED = {
    "llama3": _llama3,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
