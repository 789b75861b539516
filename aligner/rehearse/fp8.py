"""Linear layers in FP8 (`model.megatron.fp8`) without TransformerEngine, whose kernels want storage: what its layers
make, keep and send, in Megatron's. A cast is one kernel, also one that writes a matrix in both directions. Each scale
is of a whole matrix, as by the recipe tensorwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.megatron import transformer_engine
from aligner.megatron.model import ColumnParallelLinear, RowParallelLinear, TransformerBlock
from aligner.plan.devices import Device
from aligner.rehearse.linear import define

KIND = torch.float8_e4m3fn
_on = [False]  # in a layer whose products are FP8


def _turned(x: Tensor, kind: torch.dtype = KIND) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], dtype=kind)


define("largest(Tensor x) -> Tensor", lambda x: x.new_empty(1, dtype=torch.float32))
define("cast(Tensor x, Tensor scale) -> Tensor", lambda x, scale: torch.empty_like(x, dtype=KIND))
define("cast_both(Tensor x, Tensor scale) -> Tensor[]", lambda x, scale: [torch.empty_like(x, dtype=KIND), _turned(x)])
define("turn(Tensor x) -> Tensor", lambda x: _turned(x, x.dtype))
_made = torch.ops.rehearsed


def _scale(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the scale of a matrix, of which each rank of the group has rows."""
    largest = _made.largest(x)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def _gathered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x
    out = x.new_empty(len(x) * group.size(), x.shape[1])
    dist.all_gather_into_tensor(out.view(torch.uint8), x.view(torch.uint8), group=group)
    return out


def _scattered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's rows of the sum over the group."""
    if group is None:
        return x
    out = x.new_empty(len(x) // group.size(), x.shape[1])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def _product(a: Tensor, b: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a [N, K] and b [M, K]."""
    return torch._scaled_mm(a, b.t(), scale_a=scale.view(()), scale_b=scale.view(()), out_dtype=dtype)


class _Linear(torch.autograd.Function):
    """x [n, ..., K] times weight [M, K]. Groups: of `gather` x is this rank's share of the rows, over `reduce` its
    gradient is a sum, over `scatter` the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gather: Any, reduce: Any, scatter: Any) -> Tensor:
        flat, scale = x.reshape(-1, x.shape[-1]), _made.largest(weight)
        ctx.groups, ctx.trains, ctx.shape = (gather, reduce, scatter), weight.requires_grad, x.shape
        scale_x = _scale(flat, gather)
        if gather is None:
            rows, kept = _made.cast_both(flat, scale_x)
        else:
            rows = kept = _made.cast(flat, scale_x)
        w, w_turned = _made.cast_both(weight, scale)
        out = _scattered(_product(_gathered(rows, gather), w, scale, x.dtype), scatter)
        ctx.save_for_backward(kept if ctx.trains else None, w, w_turned, scale)
        return out.view(-1, *x.shape[1:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (gather, reduce, scatter), (kept, _, w_turned, scale) = ctx.groups, ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        scale_g = _scale(flat, scatter)
        if scatter is None and ctx.trains:
            g, g_turned = _made.cast_both(flat, scale_g)
        else:
            g = _gathered(_made.cast(flat, scale_g), scatter)
            g_turned = _made.turn(g) if ctx.trains else None
        dx = _scattered(_product(g, w_turned, scale, grad.dtype), gather)
        if reduce is not None:
            dist.all_reduce(dx, group=reduce)
        if not ctx.trains:
            return dx.view(ctx.shape), *[None] * 4
        inputs = kept if gather is None else _made.turn(_gathered(kept, gather))
        return dx.view(ctx.shape), _product(g_turned, inputs, scale, grad.dtype), *[None] * 3


def install(sheet: Device) -> None:
    """Install the patches, after Megatron's modules."""
    block, layers = (sys.modules[kind.__module__] for kind in (TransformerBlock, ColumnParallelLinear))  # of Megatron
    is_exact = sys.modules[block.get_fp8_context.__module__].is_first_last_bf16_layer
    transformer_engine.lacks_fp8 = lambda recipe: "" if recipe in sheet.fp8 else f"{sheet.name} has no {recipe}"

    @contextmanager
    def within(config: Any, layer: int = -1, is_init: bool = False) -> Iterator[None]:
        before = _on[0]
        _on[0] = bool(config.fp8) and not is_init and not is_exact(config, layer)
        try:
            yield
        finally:
            _on[0] = before

    block.get_fp8_context = within
    for kind in (ColumnParallelLinear, RowParallelLinear):
        kind._forward_impl = _by_context(kind._forward_impl)
    scatter = layers.reduce_scatter_to_sequence_parallel_region
    layers.reduce_scatter_to_sequence_parallel_region = lambda x, **options: x if _on[0] else scatter(x, **options)


def _by_context(exact: Any) -> Any:
    def forwarded(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        if not _on[0]:
            return exact(self, input, weight, bias=bias, **options)
        group = options.get("tp_group")
        gather, reduce = (group if options.get(name) else None for name in ("sequence_parallel", "allreduce_dgrad"))
        scatter = self.tp_group if isinstance(self, RowParallelLinear) and self.sequence_parallel else None
        out = _Linear.apply(input, weight, gather, reduce, scatter)
        return out if bias is None else out + bias

    return forwarded
