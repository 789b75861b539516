"""`aligner/ops/kernels/cuda/gates.py` against its formulas: in Triton's interpreter, or on the GPU.

python -m tests.ops.kernels.cuda.gates_cases     # prints the greatest differences; exit 1 where one is too large
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch.nn.functional import gelu, silu

from tests.ops.kernels.cuda.interpreted import DEVICE, differ, fused


def plain(x, kind):
    gate, up = x.chunk(2, -1)
    if kind == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")) * up


def cases():
    """Tensors of odd widths, of several blocks of columns, with strides, with dimensions between, and without rows."""
    g = torch.Generator().manual_seed(0)
    yield torch.randn(5, 12, generator=g)
    yield torch.randn(3, 1, 14, generator=g)
    yield torch.randn(2, 2, 4100, generator=g)
    yield torch.randn(34, 6, generator=g).t() * 6  # clamped
    yield torch.randn(4, 40, generator=g)[:, 3:33]
    yield torch.randn(0, 8, generator=g)


def other_bits() -> bool:
    """Print how many numbers are not those of the operations that a CPU runs. Returns whether they are more than
    exponentials explain that differ in their last bit."""
    from aligner.ops.kernels.elementwise import _SwiGLU  # imports Triton

    g, results = torch.Generator().manual_seed(0), []
    x, grad = (torch.randn(64, width, generator=g).to(DEVICE).bfloat16() for width in (2048, 1024))
    for function in (lambda x: fused.gated(x, "silu"), lambda x: _SwiGLU.apply(x, False)):
        out = function(x.requires_grad_())
        results.append([out, *torch.autograd.grad(out, x, grad)])
    others = sum(float((y != w).float().mean()) for y, w in zip(*results, strict=True))
    print(f"{'WRONG ' * (others > 1e-3)}{others:.1e} of bfloat16 silu have other bits than by torch's operations")
    return others > 1e-3


if __name__ == "__main__":
    bad = other_bits()
    for kind, dtype in itertools.product(("silu", "gelu_tanh", "clamped"), (torch.float32, torch.bfloat16)):
        for x in cases():
            x = x.to(DEVICE, dtype)
            bad += differ(f"{kind} {[*x.shape]}", lambda x, k=kind: fused.gated(x, k), lambda x, k=kind: plain(x, k), x)
    sys.exit(bad > 0)
