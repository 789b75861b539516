"""Scaling of rotary frequencies: `model.rope_scaling.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, Section, key
from aligner.errors import ConfigError

ROPE_TYPES = ("llama3", "linear", "dynamic", "yarn", "longrope", "proportional")


@dataclass
class RopeScalingConfig(Section, key="model.rope_scaling"):
    """Keys of scaled frequencies: config.json's `rope_type` and its parameters. Factor 1 is no scaling (of longrope:
    no scaling of its angles' length; of proportional: the fraction that is rotated spans both halves of a head). The
    model alone decides, except for `factors`."""

    factor: float = key(1.0, "Factor of the context length. 1: no scaling.", least=1)
    low_freq_factor: float = key(1.0, "Value of config.json (llama3).")
    high_freq_factor: float = key(4.0, "Value of config.json (llama3).")
    original_max_position: int = key(8192, "Context length before the scaling (llama3, yarn, longrope).", least=1)
    type: str = key("llama3", "Type of scaling: config.json's `rope_type`.", choices=ROPE_TYPES)
    attention_factor: float = key(
        0.0, "Factor of cosines and sines (yarn, longrope). 0: derived from the factor.", least=0
    )
    beta_fast: float = key(32.0, "Turns over the original context above which a frequency is kept (yarn).")
    beta_slow: float = key(1.0, "Turns below which a frequency is divided by the factor (yarn).")
    mscale: float = key(0.0, "Part of the derived attention factor, with mscale_all_dim (yarn).")
    mscale_all_dim: float = key(0.0, "Divisor of the derived attention factor (yarn).")
    truncate: bool = key(True, "End the ramp at whole dimensions (yarn).")
    llama_4_scaling_beta: float = key(
        0.0, "Queries are multiplied by 1 + this x ln(1 + floor(position / original_max_position)) (yarn).", least=0
    )
    short_factor: list[float] = key([], "Divisors of the frequencies, one for each (longrope).")
    long_factor: list[float] = key([], "Divisors of the frequencies for long rows (longrope).")
    factors: str = key(
        "auto",
        "List of divisors to use (longrope). auto: long if model.max_position exceeds original_max_position.",
        choices=("auto", "short", "long"),
        resume=REFUSE,
    )

    @property
    def scales(self) -> bool:
        return self.factor != 1.0 or self.type in ("longrope", "proportional") or self.llama_4_scaling_beta > 0


def check_rope(scaling: RopeScalingConfig, rotary_dim: int) -> None:
    """Check the scaling for `rotary_dim` rotated numbers of a head. Raises ConfigError."""
    if rotary_dim % 2 or not rotary_dim:
        raise ConfigError("model.attention.rotary_fraction", f"{rotary_dim} numbers of a head", "an even number")
    if scaling.type == "longrope":
        for name in ("short_factor", "long_factor"):
            count = len(getattr(scaling, name))
            if count != rotary_dim // 2:
                expected = f"{rotary_dim // 2} numbers, half of those of a head that are rotated"
                raise ConfigError(f"model.rope_scaling.{name}", f"{count} numbers", expected)


def longest_row(scaling: RopeScalingConfig, max_position: int) -> int:
    """Return the tokens of a row for which the model's frequencies are right."""
    if scaling.type == "longrope" and scaling.factors == "short":
        return min(max_position, scaling.original_max_position)
    return max_position
