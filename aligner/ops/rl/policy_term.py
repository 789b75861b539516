"""What every policy loss returns, and the ratio they share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from aligner.ops.rl.kl import LOG_RATIO_LIMIT


class PolicyTerm(NamedTuple):
    """Nothing here is masked yet: the caller masks and aggregates. Only `per_token` has a gradient."""

    per_token: Tensor  # float32 [B, T], to be minimised
    ratio: Tensor  # float32 [B, T], policy now / policy before the update
    clipped_low: Tensor  # bool [B, T], the ratio is below its bound: no gradient
    clipped_high: Tensor  # bool [B, T], the ratio is above its bound (dual clip included): no gradient, or a capped one


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """clamp(logprobs - old_logprobs, -20, 20), float32 [B, T]."""
    return (logprobs.float() - old_logprobs.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
