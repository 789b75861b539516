"""Numbers that some families multiply by between their modules: `model.scales.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import above, at_least


@dataclass
class ScalesConfig:
    embedding: float = 1.0  # embeddings are multiplied by it
    residual: float = 1.0  # what attention and the MLP add to the residual stream
    logits: float = 1.0  # logits are divided by it
    logits_softcap: float = 0.0  # logits z become softcap * tanh(z / softcap); 0: they stay

    def __post_init__(self) -> None:
        for name in ("embedding", "residual", "logits"):
            above(f"model.scales.{name}", getattr(self, name), 0)
        at_least("model.scales.logits_softcap", self.logits_softcap, 0)
