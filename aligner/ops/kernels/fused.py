"""Whether kernels of one pass over memory compute a tensor: `torch.ops.aligner.NAME` of `cuda/operations.py`.

They are in Triton, which comes with torch for CUDA. Without it, on a CPU and in float64, callers run torch's
operations, which take more passes. Layers of linear attention ask for `cuda/linear.py`.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DEVICES, DTYPES = {"cuda"} if find_spec("triton") else set(), {torch.float32, torch.bfloat16, torch.float16}
HALVES = {torch.bfloat16, torch.float16}


def takes(x: Tensor) -> bool:
    """Return whether the operations take tensors of this device and dtype. Defines them the first time."""
    return x.device.type in DEVICES and x.dtype in DTYPES and operations() is not None


@functools.cache
def operations() -> Any:
    """Import the module that defines them, by its name, as only a GPU needs it."""
    return importlib.import_module("aligner.ops.kernels.cuda.operations")


def linear(x: Tensor) -> Any | None:
    """Return `cuda/linear.py`, which calls flash-linear-attention, if that is installed and x is in 16 bits on a GPU.
    None: the caller runs torch's operations."""
    return _linear() if x.device.type in DEVICES and x.dtype in HALVES else None


@functools.cache
def _linear() -> Any | None:
    try:
        return importlib.import_module("aligner.ops.kernels.cuda.linear")
    except ImportError as error:  # also of a release with other names
        remedy = "runs torch's operations, which are slow on a GPU: pip install 'aligner[linear]'"
        print(f"linear attention without flash-linear-attention ({error}) {remedy}", flush=True)
        return None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return torch.ops.aligner.gate(x, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.aligner.gate_backward(grad, *ctx.saved_tensors, ctx.kind), None


def gated(x: Tensor, kind: str) -> Tensor:
    """Compute x [..., 2 F] = [gate, up] -> activation(gate) * up [..., F] by `cuda/gates.py`; only x is kept for
    backward."""
    return _Gated.apply(x, kind)
