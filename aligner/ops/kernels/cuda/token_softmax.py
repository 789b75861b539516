"""What `logprobs.py` needs of the softmax of each row of logits, and the gradient, in one pass each.

With z = logits * rate and m = max_j z_j over this rank's columns: m, sum_j e^(z_j - m), sum_j e^(z_j - m) (z_j - m) and
z_target - m. `logprobs.py` adds up those of several ranks. Forward moves one number for each logit, backward two. In
bfloat16 torch's operations move 10 to 15 times as many bytes, as they pass float32 copies to each other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # columns of a step


@triton.jit
def _sums(
    logits,  # [n, V]
    targets,  # int64 [n], vocabulary ids
    out,  # float32 [4, n]: maximum, sum, weighted sum, the target's z - maximum
    rows,
    stride,
    offset,  # vocabulary id of column 0
    columns,  # leading ones, that are no padding
    width,  # V: as a rule a multiple of 16, which loads of 16 bytes need of the bound they stay in
    rate,
    ENTROPY: tl.constexpr,  # else there is no weighted sum
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top, total, weighted = -1e30, 0.0, 0.0  # not -inf, which has no difference from itself
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(logits + column, column < width, 0.0).to(tl.float32) * rate
        z = tl.where(column < columns, z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        e, kept = tl.exp(z - higher), tl.exp(top - higher)
        if ENTROPY:
            weighted = (weighted + (top - higher) * total) * kept
            weighted += tl.sum(tl.where(e == 0, 0.0, e * (z - higher)), 0)  # 0 * -inf
        total = total * kept + tl.sum(e, 0)
        top = higher
    target = tl.load(targets + row) - offset
    chosen = tl.load(logits + target, (target >= 0) & (target < columns), 0.0).to(tl.float32) * rate
    tl.store(out + row, top)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, chosen - top)  # of another rank's target anything finite


@triton.jit
def _gradient(
    logits,  # [n, V]
    targets,  # int64 [n]
    numbers,  # float32 [4, n]: log-sum-exp, gradient of the logprob, entropy, its gradient
    out,  # [n, V], dense
    rows,
    stride,
    offset,
    columns,
    width,  # V
    rate,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lse, g = tl.load(numbers + row), tl.load(numbers + rows + row) * rate
    z = tl.load(logits + row * stride + column, column < width, 0.0).to(tl.float32) * rate
    logp = z - lse
    factor = -g
    if ENTROPY:
        entropy, g_entropy = tl.load(numbers + 2 * rows + row), tl.load(numbers + 3 * rows + row)
        factor = g_entropy * -rate * (tl.maximum(logp, -1e30) + entropy) - g
    target = tl.load(targets + row) - offset
    d = tl.exp(logp) * factor + tl.where(column == target, g, 0.0)
    d = tl.where(column < columns, d, 0.0)
    tl.store(out + row * width + column, d.to(out.dtype.element_ty), column < width)


def sums(logits: Tensor, targets: Tensor, out: Tensor, offset: int, columns: int, rate: float, entropy: bool) -> None:
    """Compute logits [n, V], whose rows are dense, targets int64 [n] -> out float32 [4, n], as in `_sums`."""
    (n, width), stride = logits.shape, logits.stride(0)
    _sums[n,](logits, targets, out, n, stride, offset, columns, width, rate, entropy, BLOCK, num_warps=WARPS)


def gradient(
    logits: Tensor, targets: Tensor, numbers: Tensor, out: Tensor, offset: int, columns: int, rate: float, entropy: bool
) -> None:
    """Compute the gradient of logits -> out [n, V], dense, in their dtype; of columns that are padding 0."""
    (n, width), stride = logits.shape, logits.stride(0)
    grid = n, triton.cdiv(width, BLOCK)
    _gradient[grid](
        logits, targets, numbers, out, n, stride, offset, columns, width, rate, entropy, BLOCK, num_warps=WARPS
    )
