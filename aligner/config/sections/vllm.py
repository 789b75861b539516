"""The section `engine.vllm`, and what of a model and a layout vLLM cannot serve here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aligner.config.key import key
from aligner.config.sections.child import ChildConfig
from aligner.errors import ConfigError
from aligner.families import served_by

if TYPE_CHECKING:
    from aligner.config.schema import Config
    from aligner.config.sections.model.config import ModelConfig

VERSION = "0.32.0"  # that launchers/engine_env.sh installs


@dataclass
class VllmConfig(ChildConfig, key="engine.vllm"):
    python: str = key(
        ".venv-vllm/bin/python",
        "Python of the environment that has vLLM: a path within the checkout, or from the root. Empty: this one.",
    )


def same_minor(version: str) -> bool:
    """Whether an installed vLLM is of the releases that this was written with."""
    return version.split(".")[:2] == VERSION.split(".")[:2]


def check_model(cfg: Config, model: ModelConfig) -> None:
    """Raises ConfigError for a model that vLLM does not serve here."""
    traits, attention = model.traits, model.attention
    if "vllm" not in traits.served_by:
        expected = f"one of {', '.join(served_by('vllm'))} with engine.name=vllm: others were not compared with it"
        raise ConfigError("model.family", model.family, expected, "engine=native serves it.")
    # where config.json must switch windows on, it takes all layers to see equally far
    if traits.window_switch and len({attention.is_local(layer) for layer in range(model.num_layers)}) > 1:
        expected = f"0, or all layers local, with engine.name=vllm and model.family={model.family}"
        raise ConfigError("model.attention.window", attention.window, expected, "engine=native serves it.")
    if traits.vllm_divides_hidden and model.kv_channels * model.num_heads != model.hidden_size:
        expected = f"hidden_size / num_heads = {model.hidden_size // model.num_heads} with engine.name=vllm and Qwen 2"
        raise ConfigError("model.head_dim", model.kv_channels, expected)
