"""The kernels as torch operations `torch.ops.aligner.NAME`.

As operations they also give tensors without storage, so that rehearsals count their bytes and launches. Triton is
imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

library = torch.library.Library("aligner", "DEF")
OPERATIONS: dict[str, Callable] = {}
_COLUMNS = "int offset, int columns, float rate, bool entropy"


def _define(schema: str, run: Callable) -> None:
    """Define an operation. `run` returns new tensors, and fills them unless they have no storage."""
    OPERATIONS[library.define(schema)] = run
    for key in ("CUDA", "Meta"):
        library.impl(schema.partition("(")[0], run, key)


def _gate(x: Tensor, kind: str) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if not x.is_meta:
        from aligner.ops.kernels.cuda import gates

        gates.forward(x.contiguous(), out, kind)
    return out


def _gate_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    out = x.new_empty(x.shape)
    if not x.is_meta:
        from aligner.ops.kernels.cuda import gates

        gates.backward(grad.contiguous(), x.contiguous(), out, kind)
    return out


def _token_sums(logits: Tensor, targets: Tensor, offset: int, columns: int, rate: float, entropy: bool) -> Tensor:
    out = logits.new_empty(4, len(logits), dtype=torch.float32)
    if out.numel() and not logits.is_meta:
        from aligner.ops.kernels.cuda import token_softmax

        token_softmax.sums(_dense_rows(logits), targets.contiguous(), out, offset, columns, rate, entropy)
    return out


def _token_gradient(
    logits: Tensor, targets: Tensor, numbers: Tensor, offset: int, columns: int, rate: float, entropy: bool
) -> Tensor:
    out = logits.new_empty(logits.shape)
    if out.numel() and not logits.is_meta:
        from aligner.ops.kernels.cuda import token_softmax

        rows, targets = _dense_rows(logits), targets.contiguous()
        token_softmax.gradient(rows, targets, numbers, out, offset, columns, rate, entropy)
    return out


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool, back: bool) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel() and not x.is_meta:
        from aligner.ops.kernels.cuda import rope

        if back:
            rope.rotate(out[:, None], [_dense_rows(x)], cos, sin, neighbours, back)
        else:
            rope.rotate(x.contiguous()[:, None], [out], cos, sin, neighbours, back)
    return out


def _split(mixed: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> tuple[Tensor, Tensor, Tensor]:
    n, groups, each, d = mixed.shape
    parts = mixed.new_empty(n, groups * (each - 2), d), mixed.new_empty(n, groups, d), mixed.new_empty(n, groups, d)
    if mixed.numel() and not mixed.is_meta:
        from aligner.ops.kernels.cuda import rope

        rope.rotate(mixed.contiguous(), parts, cos, sin, neighbours, back=False)
    return parts


def _join(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    n, groups, d = key.shape
    out = key.new_empty(n, groups, query.shape[1] // groups + 2, d)
    if out.numel() and not key.is_meta:
        from aligner.ops.kernels.cuda import rope

        rope.rotate(out, [_dense_rows(x) for x in (query, key, value)], cos, sin, neighbours, back=True)
    return out


def _sum_pairs(x: Tensor, index: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    out = x.new_empty(len(index) // top_k, x.shape[1])
    if out.numel() and not x.is_meta:
        from aligner.ops.kernels.cuda import pair_sums

        pair_sums.add_up(x.contiguous(), index, None if weights is None else weights.contiguous(), out)
    return out


def _sum_pairs_backward(grad: Tensor, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    d_x, d_weights = x.new_empty(x.shape), weights.new_empty(weights.shape)
    if weights.numel() and not x.is_meta:
        from aligner.ops.kernels.cuda import pair_sums

        pair_sums.gradient(grad.contiguous(), x.contiguous(), index, weights.contiguous(), d_x, d_weights)
    return d_x, d_weights


_define("gate(Tensor x, str kind) -> Tensor", _gate)
_define("gate_backward(Tensor grad, Tensor x, str kind) -> Tensor", _gate_backward)
_define(f"token_sums(Tensor logits, Tensor targets, {_COLUMNS}) -> Tensor", _token_sums)
_define(f"token_gradient(Tensor logits, Tensor targets, Tensor numbers, {_COLUMNS}) -> Tensor", _token_gradient)
_define("rotate(Tensor x, Tensor cos, Tensor sin, bool neighbours, bool back) -> Tensor", _rotate)
_define("split(Tensor mixed, Tensor cos, Tensor sin, bool neighbours) -> (Tensor, Tensor, Tensor)", _split)
_define("join(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, bool neighbours) -> Tensor", _join)
_define("sum_pairs(Tensor x, Tensor index, Tensor? weights, int top_k) -> Tensor", _sum_pairs)
_define(
    "sum_pairs_backward(Tensor grad, Tensor x, Tensor index, Tensor weights) -> (Tensor, Tensor)", _sum_pairs_backward
)
