"""Products x W^T on a CPU whose matrix is packed beforehand as oneDNN's kernels read it.

Otherwise oneDNN packs a matrix in every call: for few rows that is up to half of the time (benchmarks/log.md).
The bits are the same. A single row is computed as one of two, as oneDNN has other kernels for it, which sum in
another order. So a row is the same whatever rows it is computed with.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from aligner.ops.kernels.bfloat16_products import widened
from aligner.ops.kernels.onednn_products import has_avx512, onednn_leads

SMALLEST = 1 << 15  # numbers of a matrix; below, starting oneDNN costs more than it saves
SMALLEST_BESIDE_MKL = 1 << 19  # where MKL's products of matrices that are not packed are as fast
_ROWS = 16  # for which it is laid out; it serves any number


def worth_packing(matrix: Tensor) -> bool:
    """Return whether products with such a matrix [n, k] are oneDNN's on this machine, and faster when it is packed."""
    if matrix.device.type != "cpu" or matrix.numel() < SMALLEST:
        return False
    if matrix.dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and not widened(matrix.device, matrix.dtype)
    if matrix.dtype != torch.float32 or not has_avx512():
        return False
    return onednn_leads() or matrix.numel() >= SMALLEST_BESIDE_MKL


def pack(matrix: Tensor) -> Tensor:
    """Pack a matrix for `packed_linear` and `packed_linear_add`. `to_dense` returns the matrix, with the same bits."""
    return torch.ops.mkldnn._reorder_linear_weight.default(matrix, _ROWS)


def place_of(packed: Tensor) -> tuple[int, int]:
    """Return the addresses of its first byte, and of the one after its last."""
    start = torch.ops.mkldnn.data_ptr(packed)
    return start, start + torch.ops.mkldnn._nbytes(packed)


def pack_over(packed: Tensor, matrix: Tensor) -> Tensor:
    """`pack` a matrix of the same shape and dtype over another one. If its layout differs, as it may with other
    numbers of threads, return it elsewhere."""
    new = pack(matrix)
    layouts = [torch.ops.mkldnn._get_mkldnn_serialized_md(x) for x in (packed, new)]
    if not torch.equal(*layouts):
        return new
    (start, stop), (source, _) = place_of(packed), place_of(new)
    ctypes.memmove(start, source, stop - start)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [m, k] W^T + bias [n], rounded once. Without autograd."""
    return torch.ops.mkldnn._linear_pointwise.default(_rows(x), packed, bias, "none", [], "")[: len(x)]


def packed_linear_add(base: Tensor, x: Tensor, packed: Tensor) -> Tensor:
    """Return base [m, n] + x [m, k] W^T, rounded once. Without autograd."""
    return torch.ops.mkldnn._linear_pointwise.binary(_rows(x), _rows(base), packed, None, "add")[: len(x)]


def _rows(x: Tensor) -> Tensor:
    return x if len(x) != 1 else x.expand(2, -1)
