"""The section `algorithm.kto`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import above, one_of
from aligner.errors import ConfigError

KEY = "algorithm.kto"


@dataclass
class KtoConfig:
    """Stage kto."""

    beta: float = 0.1  # times the log-ratios of whole answers
    desirable_weight: float = 1.0  # of the loss of answers with label true
    undesirable_weight: float = 1.0  # and of those with label false
    # minibatch: log-ratios are compared with z0, their mean over mismatched answers of the minibatch; none: with 0
    kl: str = "minibatch"
    # model: model.init, frozen, a copy or with model.lora the policy's own without its adapters; stored: the copy's
    # logprobs of the rows, computed before training
    reference: str = "model"

    def __post_init__(self) -> None:
        above(f"{KEY}.beta", self.beta, 0)
        above(f"{KEY}.desirable_weight", self.desirable_weight, 0)
        above(f"{KEY}.undesirable_weight", self.undesirable_weight, 0)
        one_of(f"{KEY}.kl", self.kl, ("minibatch", "none"))
        if self.reference == "none":
            expected = "model or stored: answers are desirable or not beside what the reference makes of them"
            raise ConfigError(f"{KEY}.reference", "none", expected)
        one_of(f"{KEY}.reference", self.reference, ("model", "stored"))

    @property
    def second_model(self) -> bool:
        """Whether the reference is asked at each step: the mismatched answers depend on the order of the rows."""
        return self.reference == "model" or self.kl == "minibatch"
