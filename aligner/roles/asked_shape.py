"""What somebody asked of a model's shape beside `model.init`, whose folder decides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError
from aligner.families.table import parameters
from aligner.roles.model_init import find_shape, shape_of

LEFT_OPEN = {"vocab_size": 0, "head_dim": 0}  # values that ask for nothing


def with_real_shape(cfg: Config) -> Config:
    """As `model.init` decides, where it names something that is there."""
    if cfg.model.init == "random" or not Path(cfg.model.init).expanduser().exists():
        return cfg
    return replace(cfg, model=find_shape(cfg.model, cfg.model.init))


def check_shape(cfg: Config, asked: Mapping[str, Any], preset: str = "") -> str:
    """`asked`: keys of the shape that were set, with their values; `preset`: the option of group `model` that was
    chosen. Raises ConfigError for a key of another value than the folder's. Returns a line for people where the preset
    is of another shape, else an empty one."""
    real = with_real_shape(cfg).model
    if real is cfg.model:
        return ""
    for key in asked:
        name = key.removeprefix("model.")
        there, wanted = (reduce(getattr, name.split("."), shape) for shape in (real, cfg.model))
        if there != wanted and LEFT_OPEN.get(name) != wanted:
            expected = f"{there!r}, as in model.init={cfg.model.init}, which decides the model's shape"
            raise ConfigError(key, asked[key], expected, "Leave the key out.")
    if not preset or _shape(real) == _shape(cfg.model):
        return ""
    return (
        f"WARNING: model={preset} has no effect: the shape is that of model.init={cfg.model.init}, which is another: "
        f"{real.family}, {real.num_layers} layers of {real.hidden_size}, {parameters(real):,} parameters"
    )


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Without what a preset leaves to the tokenizer, and what is only said in other words."""
    shape = shape_of(replace(model, head_dim=model.kv_channels, vocab_size=0))
    return {name: value for name, value in shape.items() if name != "max_position"}
