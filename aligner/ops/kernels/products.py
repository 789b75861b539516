"""Matrix products the fastest way on this machine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.ops.kernels.bfloat16_products import widen_bfloat16_products, widened
from aligner.ops.kernels.onednn_products import add_product, onednn_leads, onednn_product, use_onednn_products
from aligner.ops.kernels.packed_products import packed_linear, packed_linear_add


def use_fast_products(device: torch.device, dtype: torch.dtype) -> None:
    """Let this process compute matrix products of such tensors that way, for good."""
    if widened(device, dtype):
        widen_bfloat16_products()
    elif device.type == "cpu" and dtype == torch.float32:
        use_onednn_products()


def shape_step(count: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of which `count` rows should be made a multiple. Where products are oneDNN's it is at most a
    sixteenth of `count`: oneDNN compiles a kernel for each shape, in up to five times as long as a small product
    takes. Else it is 1."""
    onednn = onednn_leads() if dtype == torch.float32 else dtype == torch.bfloat16 and not widened(device, dtype)
    return 1 << max(0, count.bit_length() - 5) if device.type == "cpu" and onednn else 1


def product_into(out: Tensor, a: Tensor, b: Tensor, base: Tensor | None = None) -> Tensor:
    """Compute out = a b, plus `base` [m, n] or [n], rounded once: instead of the `out=` variants. Without autograd."""
    if widened(a.device, a.dtype):
        wide = a.float(), b.float()
        return out.copy_(torch.mm(*wide) if base is None else torch.addmm(base.float(), *wide))
    if base is not None:
        return add_product(out, base, a, b)
    product = onednn_product(a, b)
    return torch.mm(a, b, out=out) if product is None else out.copy_(product)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [m, k] W^T, of a plain or a packed matrix. Without autograd."""
    return packed_linear(x, weight) if weight.is_mkldnn else F.linear(x, weight)


def add_linear(base: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return base + x W^T, rounded once, of a plain or packed matrix; perhaps in place of `base`. Without autograd."""
    return packed_linear_add(base, x, weight) if weight.is_mkldnn else base.addmm_(x, weight.t())
