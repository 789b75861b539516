"""bfloat16 matrix products on a CPU without instructions for them.

torch has slow loops there, up to a hundred times slower than the same product in float32. The product of two bfloat16
numbers is exact in float32, and torch sums in float32 too and rounds once at the end: widening the operands gives the
same result up to the order of the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def widen_bfloat16_products() -> torch.library.Library | None:
    """Let this process' `mm`, `bmm`, `addmm` and `baddbmm` of bfloat16 tensors on the CPU compute in float32, for
    good. Returns None, and changes nothing, if the CPU has instructions for bfloat16."""
    if not _slow_here():
        return None
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (("mm", _product(torch.mm)), ("bmm", _product(torch.bmm))):
        library.impl(name, kernel, "CPU")
    for name, kernel in (("addmm", torch.addmm), ("baddbmm", torch.baddbmm)):
        library.impl(name, _sum(kernel), "CPU")
        library.impl(f"{name}_", _sum_into(kernel), "CPU")
    return library


@functools.cache
def _slow_here() -> bool:
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widened(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of such tensors are faster in float32."""
    return dtype == torch.bfloat16 and device.type == "cpu" and _slow_here()


# The `out=` variant of each operation is another kernel, which stays torch's: other types end there.


def _product(torch_op: Callable) -> Callable:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
            return torch_op(a, b, out=out)
        return out.copy_(torch_op(a.float(), b.float()))

    return kernel


def _sum(torch_op: Callable) -> Callable:
    def kernel(base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        if not base.dtype == a.dtype == b.dtype == torch.bfloat16:
            return torch_op(base, a, b, beta=beta, alpha=alpha, out=out)
        return out.copy_(torch_op(base.float(), a.float(), b.float(), beta=beta, alpha=alpha))

    return kernel


def _sum_into(torch_op: Callable) -> Callable:
    def kernel(base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not base.dtype == a.dtype == b.dtype == torch.bfloat16:
            return torch_op(base, a, b, beta=beta, alpha=alpha, out=base)
        return base.copy_(torch_op(base.float(), a.float(), b.float(), beta=beta, alpha=alpha))

    return kernel
