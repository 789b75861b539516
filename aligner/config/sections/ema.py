"""The section `ema`: an average of the policy's weights beside the last ones."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.errors import ConfigError


@dataclass
class EmaConfig:
    decay: float = 0.0  # of the average of the policy's weights, per optimizer step (0.992, 0.9999); 0: none is kept

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError("ema.decay", self.decay, "a number >= 0 and < 1 (0: no average is kept)")
