"""Layers of linear attention (`../delta_rule.py`, `../mamba2.py`) by the kernels of flash-linear-attention.

They multiply in the dtype of the values. Sums and the states that they return are in float32.
"""

from __future__ import annotations

import torch
from fla.modules.convolution import causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

Ends = Tensor | None  # where packed rows begin, and the end: int32 [rows + 1]


def mix(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Ends) -> Tensor:
    """Compute what `causal_mix` does of whole rows."""
    return causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=ends)[0]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, ends: Ends
) -> tuple[Tensor, Tensor]:
    return chunk_gated_delta_rule(
        query,
        key,
        value,
        decay,
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=ends,
    )


def delta_steps(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, changes: bool = True
) -> Tensor:
    out, last = fused_recurrent_gated_delta_rule(
        query,
        key,
        value,
        decay,
        beta=beta,
        initial_state=state,
        output_final_state=changes,
        use_qk_l2norm_in_kernel=True,
    )
    if changes:
        state.copy_(last)
    return out


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    state: Tensor | None,
    ends: Ends,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2 as simple gated linear attention: keys with the decays d a, and values d x."""
    q, k = (x.repeat_interleave(value.shape[2] // key.shape[2], 2) for x in (query, key))
    written = (value * step[..., None]).to(value.dtype)
    out, last = chunk_simple_gla(
        q, k, written, step * rate, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=ends
    )
    return torch.addcmul(out, skip.to(out.dtype)[:, None], value), last
