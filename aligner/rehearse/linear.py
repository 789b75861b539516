"""flash-linear-attention (`ops/kernels/cuda/linear.py`), whose kernels want storage: operations with their results, and
what they write in between. A rehearsal has it where it is installed, under the names that it is imported by.

Each direction is one kernel here and some ten there; its bytes and operations are those of all.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from aligner.ops.kernels.delta_rule import CHUNK
from aligner.plan.linear import package_installed

library = torch.library.Library("rehearsed", "DEF")


def define(schema: str, run: Any) -> None:
    library.impl(library.define(schema), run, "Meta")


def _between(k: Tensor, v: Tensor, delta: bool) -> list[Tensor]:
    """Return what both directions make for each head: each chunk's state, and keys and values of the delta rule's
    system."""
    (batch, length, heads, width), dk = v.shape, k.shape[3]
    states = v.new_empty(batch, -(-length // CHUNK), heads, dk, width)
    return [states, *([v.new_empty(batch, length, heads, dk), torch.empty_like(v), torch.empty_like(v)] * delta)]


def _forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, rows: int) -> list[Tensor]:
    delta, state = beta is not None, v.new_empty(rows, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    kept = [torch.empty_like(q), torch.empty_like(k), v.new_empty(*v.shape[:3], CHUNK)] if delta else []
    return [torch.empty_like(v), state, *kept, *_between(k, v, delta)]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, system: Tensor | None
) -> list[Tensor]:
    made = _between(k, v, beta is not None)
    return [*(torch.empty_like(x) for x in (q, k, v, g, beta) if x is not None), torch.empty_like(made[0]), *made]


_IN = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta"
define(f"rule({_IN}, int rows) -> Tensor[]", _forward)
define(f"rule_backward(Tensor grad, {_IN}, Tensor? system) -> Tensor[]", _backward)
define("mix(Tensor x, Tensor weight, Tensor? bias) -> Tensor", lambda x, weight, bias: torch.empty_like(x))
define("mix_backward(Tensor grad, Tensor x) -> Tensor[]", lambda grad, x: [torch.empty_like(x), torch.empty_like(x)])
define("step(Tensor v, Tensor state) -> Tensor[]", lambda v, state: [torch.empty_like(v), torch.empty_like(state)])


@register_flop_formula(torch.ops.rehearsed.rule)
def _operations(q: torch.Size, k: torch.Size, v: torch.Size, g: Any, beta: Any, *others: Any, **options: Any) -> int:
    """Count as `plan/linear.py`."""
    state, inside = (4, 2) if beta is None else (6, 5)
    return v[0] * v[1] * v[2] * (state * k[3] * v[3] + inside * CHUNK * (k[3] + v[3]))


@register_flop_formula(torch.ops.rehearsed.rule_backward)
def _backward_operations(grad: torch.Size, *sizes: Any, **options: Any) -> int:
    return 2 * _operations(*sizes)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ends: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Any:
        rows = len(q) if ends is None else len(ends) - 1
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        out, state, *made = torch.ops.rehearsed.rule(q, k, v, g, beta, rows)
        q, k, system = (q, k, None) if beta is None else made[:3]
        ctx.save_for_backward(q, k, v, g, beta, system)
        return out, state

    @staticmethod
    def backward(ctx: Any, grad: Tensor, state: Tensor) -> tuple[Any, ...]:
        delta = ctx.saved_tensors[4] is not None
        grads = torch.ops.rehearsed.rule_backward(grad.contiguous(), *ctx.saved_tensors)
        return None, *grads[: 4 + delta], *[None] * (not delta)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.ops.rehearsed.mix(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        d_x, _ = torch.ops.rehearsed.mix_backward(grad, x)
        return d_x, torch.empty_like(weight), None if bias is None else torch.empty_like(bias)


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Any = None, cu_seqlens: Any = None, **others: Any) -> Any:
    return _Rule.apply(cu_seqlens, q, k, v, g, beta)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **others: Any) -> Any:
    return torch.ops.rehearsed.step(v.contiguous(), initial_state)


def _mix(x: Tensor, weight: Tensor, bias: Tensor | None, **others: Any) -> tuple[Tensor, None]:
    return _Mix.apply(x, weight, bias), None


MODULES: dict[str, Any] = {
    "fla.modules.convolution": {"causal_conv1d": _mix},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _chunks, "fused_recurrent_gated_delta_rule": _step},
    "fla.ops.simple_gla": {"chunk_simple_gla": _chunks},
}


def install() -> None:
    if package_installed():
        sys.modules.update({name: SimpleNamespace(**functions) for name, functions in MODULES.items()})
