"""The memory of a Mamba-2 layer (Dao & Gu 2024, arXiv:2405.21060): one matrix for each head, however long the row is.

    S_t = exp(d_t a) S_{t-1} + d_t k_t x_t^T        y_t = S_t^T q_t + s x_t

a < 0 and s are numbers of a head, d_t > 0 is its step, x_t its input. Heads of a group share k (B in the paper) and q
(C). Everything is computed in float32 (in float64 of float64 input). Steps have no bounds, as in training and in
`time_step_limit` of config.json; transformers (5.23) takes `time_step_min` for one. In 16 bits on a GPU
flash-linear-attention computes it where that is installed (`cuda/linear.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.config.sections.model.linear import LinearConfig
from aligner.ops.kernels import fused
from aligner.ops.kernels.delta_rule import causal_mix, decays, in_chunks, repeated, token_by_token

CHUNK = 64
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute rows in order. query, key [B, T, G, dk], value (x) [B, T, H, dv] (heads of a group are neighbours), step
    (d) [B, T, H], rate (a) and skip (s) [H], state [B, H, dk, dv] before the first token (None: 0) -> ([B, T, H, dv]
    of value's dtype, state after the last). A token with d = 0 leaves the state unchanged. `ends` as in `delta_rule`.

    Rows are computed in chunks, with products of matrices inside (section 6). Only the state passes from chunk to
    chunk."""
    if kernels := fused.linear(value):
        return kernels.scan(query, key, value, step, rate, skip, state, ends)
    dtype, (batch, length, heads, width) = value.dtype, value.shape
    q, k, x = repeated(query, key, value)
    wide = x.dtype
    chunk = min(chunk, length)
    q, k, v, d = in_chunks(chunk, q, k, x, step.to(wide))
    v = v * d[..., None]
    total = (d * rate.to(wide)[:, None, None]).cumsum(3)
    inside = (q @ k.mT * decays(total)) @ v
    written = (k * (total[..., -1:] - total).exp()[..., None]).mT @ v
    q, kept = q * total.exp()[..., None], total[..., -1, None, None].exp()
    state = v.new_zeros(batch, heads, k.shape[-1], width) if state is None else state.to(wide)
    outs = []
    for i in range(q.shape[2]):
        outs.append(q[:, :, i] @ state + inside[:, :, i])
        state = state * kept[:, :, i] + written[:, :, i]
    out = torch.stack(outs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return (out + skip.to(wide)[:, None] * x).to(dtype), state


def scan_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    state: Tensor,
    changes: bool = True,
) -> Tensor:
    """Compute the few tokens of each row one after the other: query, key [n, T, G, dk], value [n, T, H, dv], step [n,
    T, H] -> [n, T, H, dv]. `state` [n, H, dk, dv] is changed in place if it `changes`."""
    q, k, x = repeated(query, key, value)

    def one(q: Tensor, k: Tensor, x: Tensor, step: Tensor, state: Tensor) -> Tensor:
        state.mul_((step * rate).exp()[..., None, None])
        state.addcmul_(k[..., None], (x * step[..., None])[..., None, :])
        return (q[..., None, :] @ state).squeeze(-2)

    out = token_by_token(one, (q, k, x, step), state, changes)
    return (out + skip.to(x.dtype)[:, None] * x).to(value.dtype)


def by_group(conv: Tensor, linear: LinearConfig) -> Tensor:
    """Reorder weights of channels [C, 1, K] or [C], x of all heads, then keys, then queries -> [G, `mixed_width`, K]
    or [G, `mixed_width`]: the channels of a group together."""
    keys = linear.key_heads * linear.key_head_dim
    parts = (conv if conv.dim() == 1 else conv.squeeze(1)).split(
        [linear.value_heads * linear.value_head_dim, keys, keys]
    )
    return torch.cat([kind.unflatten(0, (linear.key_heads, -1)) for kind in reversed(parts)], 1)


def prepared(mixed: Tensor, weights: Mapping[str, Tensor], linear: LinearConfig, **where: Tensor) -> Inputs:
    """Return the arguments of `scan` from a layer's projections: mixed [B, T, G, channels of a group, then a number
    for each of its heads], weights conv1d.weight [G, channels, K], conv1d.bias [G, channels], A_log, dt_bias and D
    [H]. `where`: `before` or `ends` of `causal_mix`."""
    heads, dk, times = mixed.shape[2], linear.key_head_dim, linear.values_per_key
    channels, step = mixed.split([linear.mixed_width, times], -1)
    conv, bias = (weights[f"conv1d.{name}"].flatten(0, 1) for name in ("weight", "bias"))
    x = causal_mix(channels.flatten(2), conv, bias=bias, **where).unflatten(2, (heads, -1))
    query, key, value = x.split([dk, dk, times * linear.value_head_dim], -1)
    wide = torch.promote_types(step.dtype, torch.float32)
    step, rate = F.softplus(step.flatten(2).to(wide) + weights["dt_bias"]), -weights["A_log"].to(wide).exp()
    return query, key, value.unflatten(3, (times, -1)).flatten(2, 3), step, rate, weights["D"]


def still(inputs: Inputs, real: Tensor) -> Inputs:
    """Return the arguments of `scan` with which tokens that are not `real` [B, T] leave the state unchanged."""
    query, key, value, step, rate, skip = inputs
    return query, key, value, step * real[..., None], rate, skip


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, linear: LinearConfig) -> Tensor:
    """Return x [..., H, dv] times SiLU(gate), normalised over the heads of each group, times weight [H dv]. It is
    rounded before the weight, as in transformers."""
    wide = (x.float() * F.silu(gate.float())).unflatten(-2, (-1, linear.values_per_key)).flatten(-2)
    normed = F.rms_norm(wide, wide.shape[-1:], None, eps).to(x.dtype)
    return weight.view(x.shape[-2:]) * normed.view(x.shape)
