"""Result of every policy loss, and the ratio they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligner.ops.rl.kl import LOG_RATIO_LIMIT


class PolicyTerm(NamedTuple):
    """Unmasked terms of a policy loss: the caller masks and aggregates. Only `per_token` has a gradient."""

    per_token: Tensor  # float32 [B, T], to be minimised
    ratio: Tensor  # float32 [B, T], policy now / policy before the update
    clipped_low: Tensor  # bool [B, T], the ratio is below its bound: no gradient
    clipped_high: Tensor  # bool [B, T], the ratio is above its bound (dual clip included): no gradient, or a capped one


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return clamp(logprobs - old_logprobs, -20, 20), float32 [B, T]."""
    return (logprobs.float() - old_logprobs.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@torch.no_grad()
def interpolated_logprobs(
    logprobs: Tensor, rollout_logprobs: Tensor, versions: Tensor, before: int, now: int
) -> Tensor:
    """Return a log-linear approximation of the policy's logprobs at weight version `before`, float32 [B, T].

        rollout_logprobs + a (logprobs - rollout_logprobs), a = (before - versions) / (now - versions), 1 at 0/0

    The policy is at version `now`, the engine at `versions` (int64 [B, T], versions <= before <= now). So it is
    `logprobs` in the first update of a step. In later ones it is `rollout_logprobs` of a token whose weights were
    those before the step. Source: A-3PO, arXiv:2512.06547.
    """
    behind, apart = before - versions, now - versions
    share = torch.where(apart > 0, behind / apart.clamp_min(1), 1.0)
    return torch.lerp(rollout_logprobs.float(), logprobs.float(), share.float())
