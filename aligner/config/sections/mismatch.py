"""The section `mismatch`: treatment of samples on which engine and trainer disagree."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REPORT, Section, key
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
class MismatchConfig(Section, key="mismatch"):
    correction: str = key(
        "auto",
        "Correction of the mismatch of engine and trainer: none, or methods joined by +, at most one of which weighs "
        "tokens. auto: tis_token with quantization or lag, unless the ratio is to the engine, else none. The frozen "
        "config has the choice.",
        choices=("auto", "none", *MISMATCH_BOUNDS),
        joined="+",
    )
    expect: str = key(
        "any",
        "Mismatch that is expected. zero: none. model.kernels=invariant, which auto becomes, gives logprobs of engine "
        "and trainer the same bits, and the first token that differs stops the run.",
        choices=("any", "zero"),
    )
    cap: float = key(0.0, "Largest weight of a token (tis_*). 0: the default.", least=0)
    low: float = key(
        0.0,
        "Ratio below which tokens (icepop) or samples (geometric_mask, veto) are left out. 0: the default.",
        least=0,
    )
    high: float = key(0.0, "Ratio above which they are left out. 0: the default.", least=0)
    replay_routing: bool = key(
        False,
        "Send the policy's tokens to the experts that the engine's routers chose (rollout routing replay).",
        read_for=("trajectories",),
    )
    warn_above: float = key(1.05, "token_mult_prob_error above which to warn.", least=1, resume=REPORT)
    stop_above: float = key(
        0.0,
        "token_mult_prob_error above which to stop, > 1 (1: a perfect match). 0: never.",
        above=1,
        off=0,
        resume=REPORT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.methods)) < len(self.methods) or ("none" in self.methods and len(self.methods) > 1):
            raise ConfigError("mismatch.correction", self.correction, "none, or different methods joined by +")
        if sum(name in WEIGHING for name in self.methods) > 1:
            raise ConfigError("mismatch.correction", self.correction, f"at most one of {', '.join(WEIGHING)}")
        for bound in ("cap", "low", "high"):
            users = [name for name in self.methods if bound in MISMATCH_BOUNDS.get(name, {})]
            if getattr(self, bound) and len(users) != 1:
                expected = "0 (each method's default) unless exactly one method of mismatch.correction has this bound"
                raise ConfigError(f"mismatch.{bound}", getattr(self, bound), expected)
        for name in self.methods:
            bounds = self.bounds(name)
            if not bounds.get("low", 0) < bounds.get("high", 1):
                raise ConfigError("mismatch.low", bounds["low"], f"a number below mismatch.high={bounds['high']:g}")

    @property
    def methods(self) -> list[str]:
        return ["none" if name.strip() == "auto" else name.strip() for name in self.correction.split("+")]

    def bounds(self, method: str) -> dict[str, float]:
        """Return the bounds of one method, by argument name."""
        return {key: getattr(self, key) or value for key, value in MISMATCH_BOUNDS.get(method, {}).items()}
