"""What a response's length and end do to its reward."""

from __future__ import annotations

from torch import Tensor

from aligner.config.sections.algorithm import OverlongConfig


def soft_overlong(lengths: Tensor, limit: float, cache: float) -> Tensor:
    """0 up to limit - cache; ((limit - cache) - len) / cache, down to -1 at limit; -1 beyond. float32 [B].

    lengths [B], response tokens; limit and cache > 0, in tokens. Source: DAPO, arXiv:2503.14476.
    """
    return (((limit - cache) - lengths.double()) / cache).clamp(-1, 0).float()


def shaped_rewards(rewards: Tensor, lengths: Tensor, finished: Tensor, cfg: OverlongConfig, limit: int) -> Tensor:
    """rewards less `penalty` where the response does not end in EOS, plus `soft_overlong` with a cache of
    `soft_fraction` of the limit. All [B]; lengths and limit in response tokens."""
    shaped = rewards - cfg.penalty * (~finished).float()
    return shaped + soft_overlong(lengths, limit, cfg.soft_fraction * limit) if cfg.soft_fraction else shaped
