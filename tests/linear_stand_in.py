"""Strict stand-ins on the CPU for flash-linear-attention's functions, which need a GPU: they take what the real ones
take, and compute the definition row by row. `tests/ops/kernels/cuda/linear_cases.py` runs the real ones."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from aligner.ops.kernels import delta_rule as ours
from aligner.ops.kernels import fused


def causal_conv1d(x, weight, bias, activation, cu_seqlens) -> tuple[Tensor, None]:
    assert activation == "silu" and weight.shape[0] == x.shape[2] and x.dtype == weight.dtype
    assert bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1])
    return _by_row(lambda row: (ours.causal_mix(row, weight, bias=bias), row), cu_seqlens, x)[0], None


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
) -> tuple[Tensor, Tensor]:
    assert q.shape == k.shape and g.shape == beta.shape == v.shape[:3] and v.shape[2] % k.shape[2] == 0
    assert q.dtype == k.dtype == v.dtype and g.dtype == beta.dtype == torch.float32 and q.shape[3] <= 256
    assert output_final_state and use_qk_l2norm_in_kernel and (initial_state is None or cu_seqlens is None)
    return _by_row(lambda *row: ours.delta_rule(*row, initial_state), cu_seqlens, q, k, v, g, beta)


def fused_recurrent_gated_delta_rule(q, k, v, g, beta, initial_state, **options) -> tuple[Tensor, Tensor]:
    assert initial_state.dtype == torch.float32 and q.shape[1] == 1
    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state, **options, cu_seqlens=None)


def chunk_simple_gla(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    assert q.shape == k.shape and v.shape[:3] == k.shape[:3] == g.shape and scale == 1
    assert q.dtype == k.dtype == v.dtype and g.dtype == torch.float32 and output_final_state and initial_state is None
    return _by_row(_simple_gla, cu_seqlens, q, k, v, g)


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    state, outs = torch.zeros((), dtype=torch.float32), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append((q[:, t, :, None] @ state).squeeze(2))
    return torch.stack(outs, 1), state


def _by_row(rule: Callable, ends: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    if ends is None:
        return rule(*inputs)
    lengths = ends.diff().tolist()
    assert ends.dtype == torch.int32 and min(lengths) > 0
    assert all(len(x) == 1 and x.shape[1] == sum(lengths) for x in inputs)
    outs, lasts = zip(*(rule(*row) for row in zip(*(x.split(lengths, 1) for x in inputs), strict=True)), strict=True)
    return torch.cat(outs, 1), lasts


MODULES = {
    "fla.modules.convolution": (causal_conv1d,),
    "fla.ops.gated_delta_rule": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
    "fla.ops.simple_gla": (chunk_simple_gla,),
}


@contextlib.contextmanager
def in_place() -> Iterator[list[str]]:
    """Import `cuda/linear.py` over these, and let it take tensors of any device and dtype. Yields the name of each
    called function, and whether rows were packed."""
    calls: list[str] = []
    modules = {name: ModuleType(name) for name in MODULES}
    for name, functions in MODULES.items():
        vars(modules[name]).update({f.__name__: _outside(f, calls) for f in functions})
    name = "aligner.ops.kernels.cuda.linear"
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop(name, None)
        module = importlib.import_module(name)
    with mock.patch.object(fused, "linear", lambda x: module):
        yield calls


def _outside(function: Callable, calls: list[str]) -> Callable:
    def called(*args, **kwargs):
        calls.append(function.__name__ + (" packed" if kwargs.get("cu_seqlens") is not None else ""))
        with mock.patch.object(fused, "linear", lambda x: None):
            return function(*args, **kwargs)

    return called
