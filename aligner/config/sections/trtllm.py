"""The section `engine.trtllm`, and what of a model TensorRT-LLM cannot serve here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aligner.config.sections.child import ChildConfig
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config
    from aligner.config.sections.model.config import ModelConfig

_NOT_SERVED = {
    "joined": "a family whose files keep each matrix by itself with engine.name=trtllm, which gets them so",
    "linear": "a family without linear attention with engine.name=trtllm, where it was not tried",
    "latent": "a family without latent attention with engine.name=trtllm: what it makes of such weights is unknown",
}


@dataclass
class TrtllmConfig(ChildConfig, key="engine.trtllm"):
    pass


def check_model(cfg: Config, model: ModelConfig) -> None:
    """Raises ConfigError for a model that TensorRT-LLM does not serve here."""
    for trait, expected in _NOT_SERVED.items():
        if getattr(model.traits, trait):
            raise ConfigError("model.family", model.family, expected, "engine=native serves it.")
