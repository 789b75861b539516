"""Hyper-connections whose mixing matrix is doubly stochastic (Xie et al. 2026, arXiv:2512.24880; DeepSeek-V4, section
2.2).

A token has S residual streams x_s. A module reads sum_s a_s x_s and answers y; then stream s becomes b_s y + sum_r
C_rs x_r. The factors a, b and C come from all streams of the token, and rows and columns of C sum to 1 after a few
normalisations by turns (Sinkhorn and Knopp). Factors are computed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aligner.config.sections.model.hyper import HyperConfig


class StreamWeights(NamedTuple):
    """What makes the factors, in float32: of a module, or without `post` and `mix` of the end of the model."""

    fn: Tensor  # [S * (S + 2) or S, S * H]
    base: Tensor  # [S * (S + 2) or S]
    scale: Tensor  # [3 or 1]


def read(x: Tensor, weights: StreamWeights, shape: HyperConfig, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a module reads of streams x [N, S, H], [N, H], and the factors b float32 [N, S], C float32 [N, S,
    S]. `eps` is that of the model's norms."""
    pre, post, mix = _again(_factors, x, weights, shape, eps)
    return _sum(pre, x), post, mix


def written(x: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Return the streams [N, S, H] behind a module that read x and answered y [N, H]."""
    return torch.baddbmm(post.to(x.dtype)[:, :, None] * y[:, None], mix.to(x.dtype).transpose(1, 2), x)


def joined(x: Tensor, weights: StreamWeights, shape: HyperConfig, eps: float) -> Tensor:
    """Return [N, H] of streams x [N, S, H] at the end of the model."""
    return _sum(_again(_end_factors, x, weights, shape, eps), x)


def _again(factors, x: Tensor, *rest):
    """Compute factors, and again in backward: of what makes them it would keep several times the streams."""
    return checkpoint(factors, x, *rest, use_reentrant=False) if torch.is_grad_enabled() else factors(x, *rest)


def _sum(factors: Tensor, x: Tensor) -> Tensor:
    return (factors[:, :, None] * x).sum(1).to(x.dtype)


def _mixed(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = x.flatten(1).float()
    return F.linear(flat * (flat.square().mean(1, keepdim=True) + eps).rsqrt(), fn)


def _factors(x: Tensor, weights: StreamWeights, shape: HyperConfig, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    s = shape.streams
    sizes = [s, s, s * s]
    parts = zip(_mixed(x, weights.fn, eps).split(sizes, 1), weights.scale, weights.base.split(sizes), strict=True)
    pre, post, mix = (numbers * scale + base for numbers, scale, base in parts)
    mix = mix.unflatten(1, (s, s)).softmax(2) + shape.eps
    mix = mix / (mix.sum(1, keepdim=True) + shape.eps)
    for _ in range(shape.iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + shape.eps)
        mix = mix / (mix.sum(1, keepdim=True) + shape.eps)
    return pre.sigmoid() + shape.eps, 2 * post.sigmoid(), mix


def _end_factors(x: Tensor, weights: StreamWeights, shape: HyperConfig, eps: float) -> Tensor:
    return (_mixed(x, weights.fn, eps) * weights.scale + weights.base).sigmoid() + shape.eps
