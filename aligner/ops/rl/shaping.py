"""Changes of a response's reward by its length and end."""

from __future__ import annotations

from torch import Tensor

from aligner.config.on_demand import on_demand
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.user_code import is_path


def soft_overlong(lengths: Tensor, limit: float, cache: float) -> Tensor:
    """Return 0 up to limit - cache; ((limit - cache) - len) / cache, down to -1 at limit; -1 beyond. float32 [B].

    lengths [B], response tokens; limit and cache > 0, in tokens. Source: DAPO, arXiv:2503.14476.
    """
    return (((limit - cache) - lengths.double()) / cache).clamp(-1, 0).float()


def shaped_rewards(rewards: Tensor, lengths: Tensor, finished: Tensor, cfg: AlgorithmConfig, limit: int) -> Tensor:
    """Subtract `overlong.penalty` from rewards of responses that do not end in EOS, and add `soft_overlong` with a
    cache of `overlong.soft_fraction` of the limit. Then apply the user's `shaping`. All [B]; lengths and limit in
    response tokens."""
    shaped = rewards - cfg.overlong.penalty * (~finished).float()
    if cfg.overlong.soft_fraction:
        shaped = shaped + soft_overlong(lengths, limit, cfg.overlong.soft_fraction * limit)
    return on_demand("algorithm.shaping")(shaped, lengths, finished, limit, cfg) if is_path(cfg.shaping) else shaped
