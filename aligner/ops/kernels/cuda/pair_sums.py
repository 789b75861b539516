"""Sums over the k experts of each token, whose rows lie by expert, and their gradient, in one kernel each.

    out_t = sum_j w_tj x_i(t, j)        dx_i(t, j) = w_tj g_t        dw_tj = <x_i(t, j), g_t>

x [M, H] by expert, i(t, j) the row of token t's j-th expert, none from M on, g [N, H] the gradient of out. Rows are not
put into the order of tokens first, which moves each of their numbers twice more. Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # columns of a step


@triton.jit
def _sum(x, index, weights, out, rows, width, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        row = tl.load(index + token * TOP_K + j)
        numbers = tl.load(x + row * width + column, (column < width) & (row < rows), 0.0).to(tl.float32)
        if WEIGHTED:
            numbers *= tl.load(weights + token * TOP_K + j).to(tl.float32)
        total += numbers
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), column < width)


@triton.jit
def _gradient(grad, x, index, weights, d_x, d_weights, rows, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    row, weight = tl.load(index + pair), tl.load(weights + pair).to(tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        here = (column < width) & (row < rows)
        g = tl.load(grad + pair // TOP_K * width + column, here, 0.0).to(tl.float32)
        products += g * tl.load(x + row * width + column, here, 0.0).to(tl.float32)
        tl.store(d_x + row * width + column, (weight * g).to(d_x.dtype.element_ty), here)
    tl.store(d_weights + pair, tl.sum(products, 0).to(d_weights.dtype.element_ty))


def add_up(x: Tensor, index: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Compute x [M, H], index int64 [N k], weights [N, k] or None for 1 -> out [N, H]; all dense."""
    n, width = out.shape
    factors = x if weights is None else weights  # some tensor has to be
    grid = n, triton.cdiv(width, BLOCK)
    _sum[grid](x, index, factors, out, len(x), width, len(index) // n, weights is not None, BLOCK, num_warps=WARPS)


def gradient(grad: Tensor, x: Tensor, index: Tensor, weights: Tensor, d_x: Tensor, d_weights: Tensor) -> None:
    """Compute grad [N, H] -> d_x [M, H], d_weights [N, k]; all dense."""
    rows, width = x.shape
    top_k = weights.shape[1]
    _gradient[len(index),](grad, x, index, weights, d_x, d_weights, rows, width, top_k, BLOCK, num_warps=WARPS)
