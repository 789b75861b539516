"""float32 matrix products on a processor with AVX-512 that is not Intel's.

torch's products are MKL's, which leaves these instructions unused there; oneDNN, which torch has as well, uses them and
is about twice as fast (benchmarks/log.md). Both multiply and sum in float32: only the order of the sums differs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

SMALLEST = 1 << 22  # multiplications of a product; below, starting oneDNN costs more than it saves


@functools.cache
def use_onednn_products() -> torch.library.Library | None:
    """Let this process' `mm`, `addmm` and `addmm_` of float32 tensors on the CPU be oneDNN's, for good. Returns None,
    and changes nothing, where MKL is no slower."""
    if not onednn_leads():
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _mm, "CPU")
    library.impl("addmm", _addmm, "CPU")
    library.impl("addmm_", _addmm_, "CPU")
    return library


def has_avx512() -> bool:
    """Return whether this machine can use these instructions."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def onednn_leads() -> bool:
    """Return whether oneDNN's float32 products are the faster ones here."""
    processor = Path("/proc/cpuinfo")
    return (
        has_avx512()
        and torch.backends.mkl.is_available()
        and processor.exists()
        and "GenuineIntel" not in processor.read_text()
    )


def onednn_product(a: Tensor, b: Tensor) -> Tensor | None:
    """Multiply a [m, k] b [k, n], row by row in memory; None if oneDNN is not faster here, or it is no product of
    matrices."""
    if not (a.dtype == b.dtype == torch.float32 and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]):
        return None
    (m, k), n = a.shape, b.shape[1]
    if m * k * n < SMALLEST or not onednn_leads() or not a.device.type == b.device.type == "cpu":
        return None
    # linear(x, w) = x w^T copies an x that is not contiguous, and takes w in either order
    if a.is_contiguous() or a.numel() <= b.numel() + m * n:
        return _linear(a, _dense(b).t())
    return _linear(b.t(), _dense(a)).t().contiguous()


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def _dense(x: Tensor) -> Tensor:
    """Return x, copied if neither it nor its transpose is contiguous: oneDNN has no fast kernel for a part of a
    matrix."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def add_product(out: Tensor, base: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute out = beta base + alpha a b, by oneDNN where it is faster. `out` may be `base` [m, n] or [n]."""
    product = onednn_product(a, b) if beta == alpha == 1 else None
    if product is None:
        return torch.addmm(base, a, b, beta=beta, alpha=alpha, out=out)
    return torch.add(product, base, out=out)


# The `out=` variant of each operation is another kernel, which stays torch's: the rest ends there.


def _mm(a: Tensor, b: Tensor) -> Tensor:
    product = onednn_product(a, b)
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1])) if product is None else product


def _addmm(base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return add_product(a.new_empty(a.shape[0], b.shape[1]), base, a, b, beta, alpha)


def _addmm_(base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return add_product(base, base, a, b, beta, alpha)
