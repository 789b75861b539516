"""Changes of a response's reward by its length and end."""

from __future__ import annotations

from torch import Tensor

from aligner.config.sections.algorithm import OverlongConfig


def soft_overlong(lengths: Tensor, limit: float, cache: float) -> Tensor:
    """Return 0 up to limit - cache; ((limit - cache) - len) / cache, down to -1 at limit; -1 beyond. float32 [B].

    lengths [B], response tokens; limit and cache > 0, in tokens. Source: DAPO, arXiv:2503.14476.
    """
    return (((limit - cache) - lengths.double()) / cache).clamp(-1, 0).float()


def shaped_rewards(rewards: Tensor, lengths: Tensor, finished: Tensor, cfg: OverlongConfig, limit: int) -> Tensor:
    """Subtract `penalty` from rewards of responses that do not end in EOS, and add `soft_overlong` with a cache of
    `soft_fraction` of the limit. All [B]; lengths and limit in response tokens."""
    shaped = rewards - cfg.penalty * (~finished).float()
    return shaped + soft_overlong(lengths, limit, cfg.soft_fraction * limit) if cfg.soft_fraction else shaped
