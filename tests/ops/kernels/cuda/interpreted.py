"""The operations of `ops/kernels/cuda/operations.py` on a GPU or, in Triton's interpreter, on tensors of the CPU.

Triton decides whether it interprets when it is imported: this is for processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from aligner.ops.kernels import fused  # noqa: E402

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}  # of the greatest number


def interpret() -> None:
    """Run the operations on the CPU. To bfloat16 the interpreter cuts digits off, where a GPU rounds to the nearest."""
    from triton.runtime import interpreter

    for name, run in fused.operations().OPERATIONS.items():
        fused.operations().library.impl(name, run, "CPU")
    fused.DEVICES.add("cpu")
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, into: Any, mode: Any) -> Any:
        if f"{source} {into}" != "fp32 bf16":
            return convert(data, source, into, mode)
        return torch.from_numpy(np.array(data, np.float32)).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = rounded


if DEVICE == "cpu":
    interpret()


def differ(what: str, ours: Callable, plain: Callable, *inputs: Tensor) -> bool:
    """Print how far results and gradients are from those of `plain` in float64, over their greatest number. Returns
    whether that is too far. Gradients of the results have strides of their own."""
    a = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    b = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    results = []
    for function, each in ((ours, a), (plain, b)):
        outs = function(*each)
        outs = [outs] if isinstance(outs, Tensor) else [y for y in outs if y is not None]
        weights = [_weights(y, inputs[0].dtype) for y in outs]
        results.append([*outs, *torch.autograd.grad(outs, [x for x in each if x.requires_grad], weights)])
    error = 0.0
    for y, w in zip(*results, strict=True):
        assert y.shape == w.shape, (y.shape, w.shape)
        if y.numel():
            error = max(error, float(((y.double() - w).abs().max() / w.abs().max().clamp_min(1e-30)).detach()))
    wrong = not error <= CLOSE[inputs[0].dtype]
    print(f"{'WRONG ' if wrong else ''}{error:.1e} {inputs[0].dtype} {what}")
    return wrong


def _weights(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of the dtype that both sides know, with dimensions in another order than theirs in memory."""
    numbers = torch.randn(*y.shape[::-1], generator=torch.Generator().manual_seed(y.numel()))
    return numbers.permute(*range(y.dim())[::-1]).to(y.device, dtype).to(y.dtype)
