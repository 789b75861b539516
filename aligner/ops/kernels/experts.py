"""Mixtures of experts: the routing of tokens, and the matrix products of all experts at once.

A token's router logits z give p = softmax(z) over all experts. The k experts of largest p compute it, weighted by
their p, which `normalise` divides by their sum (Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021,
arXiv:2101.03961). A *pair* is one token with one of its experts. Pairs are sorted by expert, so that an expert's
tokens lie together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aligner.config.sections.model.moe import MoeConfig
from aligner.families.family import GATE_ALPHA, GATE_LIMIT
from aligner.ops.kernels import fused
from aligner.ops.kernels.invariant import linear as tiled
from aligner.ops.kernels.products import product_into
from aligner.ops.kernels.spread import spread


class Routing(NamedTuple):
    probs: Tensor  # float32 [N, E], sums to 1
    weights: Tensor  # float32 [N, k]
    experts: Tensor  # int64 [N, k]
    own: Tensor  # int64 [N, k]: those of largest p; equal to `experts` unless others were chosen


class ReplayedExperts(NamedTuple):
    """Experts that the engine chose, for some of the tokens."""

    experts: Tensor  # integers [N, k]
    known: Tensor  # bool [N]


def route(
    hidden: Tensor,
    router: Tensor,
    top_k: int,
    normalise: bool,
    bias: Tensor | None = None,
    chosen_before: ReplayedExperts | None = None,
    scale: Tensor | None = None,
    invariant: bool = False,
) -> Routing:
    """Route hidden [N, H] with router [E, H], bias [E]. It computes in float32 whatever the dtype, so that a token
    near a tie of two experts falls on the same side in the trainer and in the engine. Normalised weights are a
    softmax over the chosen logits only. The number is the same, and an expert that was not chosen has a gradient of
    exactly 0, not one of rounding, of which Adam would make a step.

    Experts `chosen_before` replace those of largest p, and are weighted by this router's p: it learns as if it had
    chosen them (arXiv:2510.11370). Each weight is multiplied by its expert's `scale` [E].
    `invariant`: the product is as in `invariant.py`.
    """
    product = tiled if invariant else torch.nn.functional.linear
    logits = product(hidden.float(), router.float(), None if bias is None else bias.float())
    probs = logits.softmax(-1)
    chosen, own = logits.topk(top_k, dim=-1)
    experts = own
    if chosen_before is not None:
        experts = chosen_before.experts.long().where(chosen_before.known[:, None], own)
        chosen = logits.gather(-1, experts)
    weights = chosen.softmax(-1) if normalise else probs.gather(-1, experts)
    return Routing(probs, weights if scale is None else weights * scale.float()[experts], experts, own)


def rerouted(routing: Routing) -> Tensor:
    """Return bool [N]: whether the router itself would have sent the token to another set of experts."""
    return (routing.experts.sort(-1).values != routing.own.sort(-1).values).any(-1)


def route_by_groups(
    hidden: Tensor,
    router: Tensor,
    bias: Tensor | None,
    moe: MoeConfig,
    chosen_before: ReplayedExperts | None = None,
    score: Callable[[Tensor], Tensor] = torch.sigmoid,
    own: Tensor | None = None,
) -> Routing:
    """Route hidden [N, H] with router [E, H], bias float32 [E], as DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    Scores are s = sigmoid(z) of each expert alone, or another `score`. `bias` is added for the choice: the
    `top_groups` of `moe.groups` groups with the largest sums of their two best, and the k best of their experts.
    Weights are those of s, without the bias, divided by their sum if `norm_topk_prob`, times `moe.scale`. `probs` is s
    divided by its sum over all experts. `chosen_before` is as in `route`. `own` int64 [N, k]: experts that no score
    chooses."""
    scores = score(torch.nn.functional.linear(hidden.float(), router.float()))
    if own is None:
        own = _best_of_groups(scores.detach() + bias, moe)
    experts = own if chosen_before is None else chosen_before.experts.long().where(chosen_before.known[:, None], own)
    weights = scores.gather(1, experts)
    if moe.norm_topk_prob:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return Routing(scores / scores.sum(1, keepdim=True), weights * moe.scale, experts, own)


def _best_of_groups(scores: Tensor, moe: MoeConfig) -> Tensor:
    scored = scores.unflatten(1, (moe.groups, -1))
    best = scored.topk(2, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
    closed = torch.ones(best.shape[0], moe.groups, dtype=torch.bool, device=best.device).scatter_(1, best, False)
    return scored.masked_fill(closed[..., None], -torch.inf).flatten(1).topk(moe.top_k, dim=-1).indices


def root_softplus(x: Tensor) -> Tensor:
    """Return the square root of log(1 + e^x)."""
    return torch.nn.functional.softplus(x).sqrt()


class Pairs(NamedTuple):
    order: Tensor  # int64 [M]: pairs by expert, then by token
    tokens: Tensor  # int64 [M]: their tokens; pair i is of token i // k
    inverse: Tensor  # int64 [N * k]: where pair i is in `order`; M or larger if it is none
    top_k: int


def order_pairs(experts: Tensor, rows: int | None = None) -> tuple[Pairs, Tensor]:
    """Sort the pairs of experts int64 [N, k] by expert, and return the experts, sorted. A token may have fewer than k:
    none is a number behind all experts. The host must know the number of pairs, `rows`; None: N * k."""
    by_expert, order = experts.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    order = order[:rows]
    return Pairs(order, order // experts.shape[1], inverse, experts.shape[1]), by_expert


def sort_pairs(experts: Tensor, num_experts: int, rows: int | None = None) -> tuple[Pairs, Tensor]:
    """Sort the pairs of experts int64 [N, k] as `order_pairs`, and return the number of each expert's, int64 [E]."""
    pairs, by_expert = order_pairs(experts, rows)
    # not by bincount, for which CUDA lets the host wait
    ends = torch.searchsorted(by_expert, torch.arange(num_experts, device=experts.device), right=True)
    return pairs, ends.diff(prepend=ends.new_zeros(1))


def sort_own_pairs(experts: Tensor, num_experts: int, own: range, x: Tensor) -> tuple[Pairs, Tensor]:
    """Sort the pairs of experts int64 [N, k] that are in `own`, as `sort_pairs`; the others are none. Where one kernel
    computes rows like x [N, H], the host does not wait for the number of pairs: there are as many rows as there may
    be, and nothing may depend on those behind the experts' own."""
    count = len(own)
    if count == num_experts:
        return sort_pairs(experts, num_experts)
    others = (experts < own.start) | (experts >= own.stop)
    pairs, sizes = sort_pairs((experts - own.start).masked_fill_(others, count), count)
    if not (in_one_kernel(x) and fused.takes(x)):
        rows = int(sizes.sum())
        return pairs._replace(order=pairs.order[:rows], tokens=pairs.tokens[:rows]), sizes
    rows = len(experts) * min(pairs.top_k, count)
    inverse = pairs.inverse.masked_fill(others.flatten(), rows)
    return Pairs(pairs.order[:rows], pairs.tokens[:rows], inverse, pairs.top_k), sizes


def balance_loss(mean_probs: Tensor, fractions: Tensor) -> Tensor:
    """Return E * sum_i f_i P_i (Fedus et al. 2021, eq. 4 without alpha): 1 where load and probability are even.

    f_i, the fraction of pairs of expert i, is a constant; P_i is the mean of p_i over tokens. [..., E] each -> [...].
    """
    return mean_probs.shape[-1] * (fractions * mean_probs).sum(-1)


def _add_up(x: Tensor, pairs: Pairs) -> Tensor:
    if fused.takes(x):
        return torch.ops.aligner.sum_pairs(x, pairs.inverse, None, pairs.top_k)
    if len(x) == len(pairs.inverse):
        return x.index_select(0, pairs.inverse).view(-1, pairs.top_k, x.shape[1]).sum(1)
    # on the CPU, where it is in order
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(len(pairs.inverse) // pairs.top_k, x.shape[1], dtype=wide, device=x.device)
    return total.index_add_(0, pairs.tokens, x.to(wide)).to(x.dtype)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x.index_select(0, pairs.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _add_up(grad, ctx.pairs), None


def expand(x: Tensor, pairs: Pairs) -> Tensor:
    """Expand x [N, H] -> the token of each pair [M, H], by expert. The gradient is a sum of k, in a fixed order."""
    return _Expand.apply(x, pairs)


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return _add_up(x, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.pairs.tokens), None


def add_up(x: Tensor, pairs: Pairs) -> Tensor:
    """Add up x [M, H] of the pairs -> their sum for each token [N, H]."""
    return _AddUp.apply(x, pairs)


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, index, weights)
        return torch.ops.aligner.sum_pairs(x, index, weights, weights.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        d_x, d_weights = torch.ops.aligner.sum_pairs_backward(grad, *ctx.saved_tensors)
        return d_x, None, d_weights


def combine(x: Tensor, pairs: Pairs, weights: Tensor) -> Tensor:
    """Combine the experts' output for each pair [M, H], by expert -> its weighted sum for each token [N, H]."""
    if fused.takes(x):
        return _SumPairs.apply(x, pairs.inverse, weights.to(x.dtype))
    if len(x) < len(pairs.inverse):
        return add_up(x * weights.flatten()[pairs.order][:, None], pairs).to(x.dtype)
    x = spread(x, pairs.inverse, pairs.order).view(*weights.shape, x.shape[1])
    return torch.bmm(weights.to(x.dtype)[:, None], x)[:, 0]


def combine_own(x: Tensor, pairs: Pairs, weights: Tensor) -> Tensor:
    """Combine as `combine`, without a gradient, what one of several ranks has. A token's sum is of k terms, 0 for a
    pair that is none, so that it does not depend on where the experts of other tokens are."""
    weights = weights.to(x.dtype)
    if fused.takes(x):
        return torch.ops.aligner.sum_pairs(x, pairs.inverse, weights, pairs.top_k)
    x = torch.nn.functional.pad(x, (0, 0, 0, 1)).index_select(0, pairs.inverse.clamp(max=len(x)))
    return torch.bmm(weights[:, None], x.view(*weights.shape, -1))[:, 0]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(len(x), weight.shape[1])
        for rows, w, y in zip(x.split(sizes), weight, out.split(sizes), strict=True):
            if len(rows):
                product_into(y, rows, w.t())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad, d_x = grad.contiguous(), torch.empty_like(x)
        for w, g, d_part in zip(weight, grad.split(ctx.sizes), d_x.split(ctx.sizes), strict=True):
            if len(g):
                product_into(d_part, g, w)
        if not ctx.needs_input_grad[1]:  # frozen
            return d_x, None, None
        d_weight = torch.zeros_like(weight)
        for d_w, g, rows in zip(d_weight, grad.split(ctx.sizes), x.split(ctx.sizes), strict=True):
            if len(rows):
                product_into(d_w, g.t(), rows)
        return d_x, d_weight, None


def in_one_kernel(x: Tensor) -> bool:
    """Return whether one kernel multiplies the rows of all experts."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def grouped_linear(x: Tensor, weight: Tensor, sizes: Sequence[int] | Tensor, invariant: bool = False) -> Tensor:
    """Multiply the first sizes[0] rows of x [M, I] with weight[0]^T, the next sizes[1] rows with weight[1]^T, ...;
    weight [E, O, I] -> [M, O]. On CUDA in bfloat16, `sizes` may be a tensor there: one kernel (torch's `grouped_mm`).
    `invariant`: products are as in `invariant.py`.
    """
    if not invariant and in_one_kernel(x):
        ends = torch.as_tensor(sizes, device=x.device).cumsum(0).int()
        return torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    sizes = tuple(sizes.tolist() if isinstance(sizes, Tensor) else sizes)
    if invariant:
        return torch.cat([tiled(rows, own) for rows, own in zip(x.split(sizes), weight, strict=True)])
    return _GroupedLinear.apply(x, weight, sizes)


class _EachRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sizes: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(sizes)
        return values.repeat_interleave(sizes, 0, output_size=rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (sizes,) = ctx.saved_tensors
        # in float32 and in the order of rows: neither the dtype nor atomic additions round it. `unsafe`: the host does
        # not wait to check the sizes
        rows = grad.float().contiguous()
        total = torch.segment_reduce(rows, "sum", lengths=sizes, axis=0, initial=0, unsafe=True)
        return total.to(grad.dtype), None, None


def each_row(values: Tensor, sizes: Tensor, rows: int) -> Tensor:
    """Expand values [E, O] -> those of each row's expert, [rows, O]; sizes int64 [E] sums to `rows`."""
    return _EachRow.apply(values, sizes, rows)


def add_bias(x: Tensor, bias: Tensor, sizes: Tensor) -> Tensor:
    """Add the bias of each row's expert to x [M, O] by expert; bias [E, O], sizes int64 [E] sums to M."""
    return x + each_row(bias, sizes, len(x))


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = _clamped(x)
        return torch.sigmoid(GATE_ALPHA * gate).mul_(gate).mul_(up.add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = _clamped(x)
        share = torch.sigmoid(GATE_ALPHA * gate)
        d_up = grad * gate * share
        d_gate = share * (1 + GATE_ALPHA * gate * (1 - share)) * grad * (up + 1)
        own_gate, own_up = x.chunk(2, -1)  # which have no part in what was cut
        return torch.cat([d_gate.mul_(own_gate <= GATE_LIMIT), d_up.mul_(own_up.abs() <= GATE_LIMIT)], -1)


def _clamped(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)


def clamped_gate(x: Tensor) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate), x = [gate, up] along the last dimension, with the gate at most
    the limit and up within it on both sides (gpt-oss, arXiv:2508.10925). Only x is kept for backward."""
    return fused.gated(x, "clamped") if fused.takes(x) else _ClampedGate.apply(x)
