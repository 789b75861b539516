"""The section `engine.vllm`, and the models and layouts that vLLM does not serve here."""

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

VERSION = "0.32.0"  # installed by launchers/engine_env.sh


@dataclass
class VllmConfig(ChildConfig, key="engine.vllm"):
    python: str = key(
        ".venv-vllm/bin/python",
        "Python of an environment with vLLM: a path within the checkout, or absolute. Empty: this one.",
    )


def same_minor(version: str) -> bool:
    """Return whether an installed vLLM is of the same minor release as the supported one."""
    return version.split(".")[:2] == VERSION.split(".")[:2]


def check_model(cfg: Config, model: ModelConfig) -> None:
    """Check that vLLM serves the model here. Raises ConfigError."""
    traits, attention = model.traits, model.attention
    if "vllm" not in traits.served_by:
        expected = f"one of {', '.join(served_by('vllm'))} with engine.name=vllm: others were not compared with it"
        raise ConfigError("model.family", model.family, expected, "engine=native serves it.")
    # where config.json must switch windows on, vLLM gives all layers the same window
    if traits.window_switch and len({attention.is_local(layer) for layer in range(model.num_layers)}) > 1:
        expected = f"0, or all layers local, with engine.name=vllm and model.family={model.family}"
        raise ConfigError("model.attention.window", attention.window, expected, "engine=native serves it.")
    if traits.vllm_divides_hidden and model.kv_channels * model.num_heads != model.hidden_size:
        expected = f"hidden_size / num_heads = {model.hidden_size // model.num_heads} with engine.name=vllm and Qwen 2"
        raise ConfigError("model.head_dim", model.kv_channels, expected)
