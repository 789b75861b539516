"""Scaling of rotary frequencies: `model.rope_scaling.*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import at_least, one_of
from aligner.errors import ConfigError

ROPE_TYPES = ("llama3", "linear", "dynamic", "yarn", "longrope")


@dataclass
class RopeScalingConfig:
    """config.json's `rope_type` and what belongs to it; factor 1 is no scaling (of longrope: none of its angles'
    length). The model alone decides, but for `factors`."""

    factor: float = 1.0  # 1: off
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # positions before the scaling: llama3, yarn, longrope
    type: str = "llama3"  # llama3, linear, dynamic, yarn, longrope
    attention_factor: float = 0.0  # yarn, longrope: cosines and sines are multiplied by it; 0: derived from the factor
    beta_fast: float = 32.0  # yarn: turns over the original context above which a frequency is kept
    beta_slow: float = 1.0  # yarn: turns below which it is divided by the factor
    mscale: float = 0.0  # yarn: with mscale_all_dim, of the derived attention factor
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: whole dimensions at both ends of the ramp
    short_factor: list[float] = field(default_factory=list)  # longrope: divisors of the frequencies, one for each
    long_factor: list[float] = field(default_factory=list)  # longrope: likewise, for long rows
    factors: str = "auto"  # longrope: short, long, auto (long where model.max_position exceeds original_max_position)

    def __post_init__(self) -> None:
        one_of("model.rope_scaling.type", self.type, ROPE_TYPES)
        one_of("model.rope_scaling.factors", self.factors, ("auto", "short", "long"))
        at_least("model.rope_scaling.factor", self.factor, 1)
        at_least("model.rope_scaling.original_max_position", self.original_max_position, 1)
        at_least("model.rope_scaling.attention_factor", self.attention_factor, 0)

    @property
    def scales(self) -> bool:
        return self.factor != 1.0 or self.type == "longrope"


def check_rope(scaling: RopeScalingConfig, rotary_dim: int) -> None:
    """`rotary_dim` numbers of a head are rotated."""
    if rotary_dim % 2 or not rotary_dim:
        raise ConfigError("model.attention.rotary_fraction", f"{rotary_dim} numbers of a head", "an even number")
    if scaling.type == "longrope":
        for name in ("short_factor", "long_factor"):
            count = len(getattr(scaling, name))
            if count != rotary_dim // 2:
                expected = f"{rotary_dim // 2} numbers, half of those of a head that are rotated"
                raise ConfigError(f"model.rope_scaling.{name}", f"{count} numbers", expected)


def longest_row(scaling: RopeScalingConfig, max_position: int) -> int:
    """Tokens of a row for which the model's frequencies are right."""
    if scaling.type == "longrope" and scaling.factors == "short":
        return min(max_position, scaling.original_max_position)
    return max_position
