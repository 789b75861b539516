"""Numbers that some families multiply by between their modules: `model.scales.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key


@dataclass
class ScalesConfig(Section, key="model.scales"):
    embedding: float = key(1.0, "Factor of embeddings.", above=0)
    residual: float = key(1.0, "Factor of what attention and the MLP add to the residual stream.", above=0)
    logits: float = key(1.0, "Divisor of logits.", above=0)
    logits_softcap: float = key(0.0, "Logits z become softcap * tanh(z / softcap). 0: they stay.", least=0)
