"""Keys of stage kto: `algorithm.kto.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key

KEY = "algorithm.kto"


@dataclass
class KtoConfig(Section, key=KEY):
    beta: float = key(0.1, "Factor of the log-ratios of whole answers.", above=0)
    desirable_weight: float = key(1.0, "Weight of the loss of answers with label true.", above=0)
    undesirable_weight: float = key(1.0, "Weight of the loss of answers with label false.", above=0)
    kl: str = key(
        "minibatch",
        "Zero point of the log-ratios. minibatch: z0, their mean over mismatched answers of the minibatch; none: 0.",
        choices=("minibatch", "none"),
    )
    reference: str = key(
        "model",
        "Reference model. model: model.init, frozen (with model.lora the policy without its adapters); stored: its "
        "logprobs of the rows, computed before training.",
        choices=("model", "stored"),
    )

    @property
    def second_model(self) -> bool:
        """Whether the reference runs at each step: the mismatched answers depend on the order of the rows."""
        return self.reference == "model" or self.kl == "minibatch"
