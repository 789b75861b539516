"""The section `mismatch`: what to do about samples whose engine disagrees with the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import at_least, one_of
from aligner.errors import ConfigError

# `mismatch.correction` -> its bounds of r = trainer's probability / engine's, where `cap`, `low` or `high` is 0
MISMATCH_BOUNDS: dict[str, dict[str, float]] = {
    "tis_token": {"cap": 2.0},
    "tis_sequence": {"cap": 5.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "geometric_mask": {"low": 0.99, "high": 1.01},
    "veto": {"low": 1e-4, "high": 1e4},
}
WEIGHING = ("tis_token", "tis_sequence", "icepop")


@dataclass
class MismatchConfig:
    # none, or one or more of MISMATCH_BOUNDS joined by +, at most one of which weighs tokens. auto: tis_token with a
    # quantised engine or one that lags (engine.lag), where the ratio is not to the engine, else none; the frozen
    # config has the choice
    correction: str = "auto"
    cap: float = 0.0  # of a weight (tis_*); 0: the method's default
    low: float = 0.0  # r below it is left out (icepop, geometric_mask, veto); 0: the method's default
    high: float = 0.0  # r above it is left out; 0: the method's default
    # experts: the policy's tokens go to those that the engine's routers chose (rollout routing replay)
    replay_routing: bool = False
    warn_above: float = 1.05  # token_mult_prob_error
    stop_above: float = 0.0  # 0: never

    def __post_init__(self) -> None:
        for name in self.methods:
            one_of("mismatch.correction", name, ("none", *MISMATCH_BOUNDS))
        if len(set(self.methods)) < len(self.methods) or ("none" in self.methods and len(self.methods) > 1):
            raise ConfigError("mismatch.correction", self.correction, "none, or different methods joined by +")
        if sum(name in WEIGHING for name in self.methods) > 1:
            raise ConfigError("mismatch.correction", self.correction, f"at most one of {', '.join(WEIGHING)}")
        for key in ("cap", "low", "high"):
            at_least(f"mismatch.{key}", getattr(self, key), 0)
            users = [name for name in self.methods if key in MISMATCH_BOUNDS.get(name, {})]
            if getattr(self, key) and len(users) != 1:
                expected = "0 (each method's default) unless exactly one method of mismatch.correction has this bound"
                raise ConfigError(f"mismatch.{key}", getattr(self, key), expected)
        for name in self.methods:
            bounds = self.bounds(name)
            if not bounds.get("low", 0) < bounds.get("high", 1):
                raise ConfigError("mismatch.low", bounds["low"], f"a number below mismatch.high={bounds['high']:g}")
        at_least("mismatch.warn_above", self.warn_above, 1)
        if self.stop_above and not self.stop_above > 1:
            raise ConfigError("mismatch.stop_above", self.stop_above, "a number > 1 (a perfect match), or 0 for off")

    @property
    def methods(self) -> list[str]:
        return ["none" if name.strip() == "auto" else name.strip() for name in self.correction.split("+")]

    def bounds(self, method: str) -> dict[str, float]:
        """The bounds of one method, by argument name."""
        return {key: getattr(self, key) or value for key, value in MISMATCH_BOUNDS.get(method, {}).items()}
