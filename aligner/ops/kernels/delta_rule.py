"""The gated delta rule (Gated DeltaNet: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464): attention whose memory of
a row is one matrix for each head, however long the row is.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T        o_t = S_t^T q_t

g <= 0 forgets; beta in (0, 1) says how far the value that k recalls moves to v. Queries and keys become unit vectors
here, and queries are divided by sqrt(dk), as in Qwen3-Next. Everything is computed in float32 (in float64 of float64
input). In 16 bits on a GPU flash-linear-attention computes it where that is installed (`cuda/linear.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.config.sections.model.linear import LinearConfig
from aligner.ops.kernels import fused

CHUNK = 64
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_EPS = 1e-6


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute rows in order. query, key [B, T, G, dk], value [B, T, H, dv] (heads of a key are neighbours), decay (g)
    and beta [B, T, H], state [B, H, dk, dv] before the first token (None: 0) -> ([B, T, H, dv] of value's dtype,
    state after the last). A token with g = 0 and beta = 0 leaves the state unchanged. `ends`: see `cuda/linear.py`,
    which alone takes packed rows; B is 1 then.

    Rows are computed in chunks, with products of matrices inside (section 3.3). What the tokens of a chunk write
    depends on what those before them wrote, which is a triangular system. Only the state passes from chunk to chunk.
    """
    if kernels := fused.linear(value):
        return kernels.delta_rule(query, key, value, decay, beta, state, ends)
    dtype, (batch, length, heads, width) = value.dtype, value.shape
    q, k, v = _wide(query, key, value)
    wide = v.dtype
    chunk = min(chunk, length)
    q, k, v, g, b = in_chunks(chunk, q, k, v, decay.to(wide), beta.to(wide))
    total = g.cumsum(3)
    between = decays(total)
    written = torch.cat([v, k * total.exp()[..., None]], -1) * b[..., None]
    system = (k * b[..., None]) @ k.mT * between
    written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    own, recalled = written.split([width, k.shape[-1]], -1)
    inside = q @ k.mT * between
    q, k = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1, None, None].exp()
    state = v.new_zeros(batch, heads, k.shape[-1], width) if state is None else state.to(wide)
    outs = []
    for i in range(q.shape[2]):
        new = own[:, :, i] - recalled[:, :, i] @ state
        outs.append(q[:, :, i] @ state + inside[:, :, i] @ new)
        state = state * kept[:, :, i] + k[:, :, i].mT @ new
    out = torch.stack(outs, 2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2).to(dtype), state


def delta_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    changes: bool = True,
) -> Tensor:
    """Compute the few tokens of each row one after the other, so that their number changes no bit of a state: query,
    key [n, T, G, dk], value [n, T, H, dv], decay and beta [n, T, H] -> [n, T, H, dv]. `state` [n, H, dk, dv] is changed
    in place if it `changes`."""
    if kernels := fused.linear(value):
        return kernels.delta_steps(query, key, value, decay, beta, state, changes)
    numbers = *_wide(query, key, value), decay, beta
    return token_by_token(_step, numbers, state, changes).to(value.dtype)


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    state.mul_(decay.exp()[..., None, None])
    change = (v - (k[..., None, :] @ state).squeeze(-2)) * beta[..., None]
    state.addcmul_(k[..., None], change[..., None, :])
    return (q[..., None, :] @ state).squeeze(-2)


def token_by_token(step: Callable[..., Tensor], numbers: Sequence[Tensor], state: Tensor, changes: bool) -> Tensor:
    """Return what `step` returns for the numbers [n, T, ...] of each token and the state, [n, T, ...]. It changes the
    state, or a copy unless the state `changes`."""
    state = state if changes else state.clone()
    return torch.stack([step(*(x[:, t] for x in numbers), state) for t in range(numbers[0].shape[1])], 1)


def _wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit vectors of queries, scaled, and keys, and the values, as `repeated` does."""
    q, k = (x.to(torch.promote_types(value.dtype, torch.float32)) for x in (query, key))
    q, k = (x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() for x in (q, k))
    return repeated(q * key.shape[-1] ** -0.5, k, value)


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return them in the dtype of the computation, heads of queries and keys repeated for their values' heads."""
    wide = torch.promote_types(value.dtype, torch.float32)
    times = value.shape[-2] // key.shape[-2]
    q, k = (x.to(wide) if times == 1 else x.to(wide).repeat_interleave(times, -2) for x in (query, key))
    return q, k, value.to(wide)


def in_chunks(chunk: int, *numbers: Tensor) -> Iterator[Tensor]:
    """Return tensors [B, T, H, ...], padded by 0, as [B, H, chunks, chunk, ...]."""
    for x in numbers:
        padding = (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % chunk)
        yield F.pad(x, padding).unflatten(1, (-1, chunk)).movedim(3, 1)


def decays(total: Tensor) -> Tensor:
    """Return exp(g_j+1 + ... + g_i) for j <= i, else 0, of the sums g_0 + ... + g_i [..., chunk] -> [..., chunk,
    chunk]. The others, which may be huge, never come to be."""
    ahead = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    return (total[..., None] - total[..., None, :]).masked_fill(ahead, -torch.inf).exp()


def causal_mix(
    x: Tensor, weight: Tensor, before: Tensor | None = None, bias: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Return SiLU of each channel's last K inputs, weighted: x [B, T, C], weight [C, K], the last for the token
    itself, bias [C] -> [B, T, C]. `before` [B, K - 1, C] has the inputs ahead of the first (None: 0). `ends`: as in
    `delta_rule`."""
    if before is None and (kernels := fused.linear(x)):
        return kernels.mix(x, weight, bias, ends)
    past = x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2]) if before is None else before.to(x.dtype)
    inputs = torch.cat([past, x], 1).transpose(1, 2)
    return F.silu(F.conv1d(inputs, weight[:, None], bias, groups=len(weight))).transpose(1, 2)


def gates(beta: Tensor, step: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g, beta) in float32 of projections [..., H] with the heads' parameters [H]: g = -exp(log_rate)
    softplus(step + bias)."""
    wide = torch.promote_types(step.dtype, torch.float32)
    return -log_rate.to(wide).exp() * F.softplus(step.to(wide) + bias), beta.to(wide).sigmoid()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, linear: LinearConfig) -> Tensor:
    """Return the root-mean-square norm of x [..., dv] with weight [dv], times SiLU(gate), gate [..., dv]. It is
    rounded before the weight and at the end, as in transformers."""
    normed = F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
    return (weight * normed * F.silu(gate.float())).to(x.dtype)


def still(inputs: Inputs, real: Tensor) -> Inputs:
    """Return the arguments of `delta_rule` with which tokens that are not `real` [B, T] leave the state unchanged."""
    *others, decay, beta = inputs
    return *others, decay * real[..., None], beta * real[..., None]


def by_head(conv: Tensor, linear: LinearConfig) -> Tensor:
    """Reorder conv [channels, 1, K], queries of all heads, then keys, then values -> [G, `mixed_width`, K]: the
    channels of a key head together."""
    keys = linear.key_heads * linear.key_head_dim
    parts = conv.squeeze(1).split([keys, keys, linear.value_heads * linear.value_head_dim])
    return torch.cat([kind.unflatten(0, (linear.key_heads, -1)) for kind in parts], 1)


def prepared(mixed: Tensor, weights: Mapping[str, Tensor], linear: LinearConfig, **where: Tensor) -> Inputs:
    """Return the arguments of `delta_rule` from a layer's projections: mixed [B, T, G, channels of a key head, then
    two numbers for each head of its values], weights conv1d.weight [G, channels, K], A_log and dt_bias [H]. `where`:
    `before` or `ends` of `causal_mix`."""
    heads, dk, times = mixed.shape[2], linear.key_head_dim, linear.values_per_key
    channels, forward, step = mixed.split([linear.mixed_width, times, times], -1)
    x = causal_mix(channels.flatten(2), weights["conv1d.weight"].flatten(0, 1), **where).unflatten(2, (heads, -1))
    query, key, value = x.split([dk, dk, times * linear.value_head_dim], -1)
    value = value.unflatten(3, (times, -1)).flatten(2, 3)
    return query, key, value, *gates(forward.flatten(2), step.flatten(2), weights["A_log"], weights["dt_bias"])
