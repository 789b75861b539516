"""Comparison of the keys that set a model's shape with the folder of `model.init`, which decides it."""

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

LEFT_OPEN = {"vocab_size": 0, "head_dim": 0}  # values that leave it to the folder


def with_real_shape(cfg: Config) -> Config:
    """Return the config with the shape of `model.init`, if it names an existing folder."""
    if cfg.model.init == "random" or not Path(cfg.model.init).expanduser().exists():
        return cfg
    return replace(cfg, model=find_shape(cfg.model, cfg.model.init))


def check_shape(cfg: Config, asked: Mapping[str, Any], preset: str = "") -> str:
    """Compare `asked`, the keys of the shape that were set, with their values, and `preset`, the chosen option of
    group `model`. Raises ConfigError for a key of another value than the folder's. Returns a warning if the preset
    has another shape, else ""."""
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
        f"WARNING: model={preset} has no effect: the shape is that of model.init={cfg.model.init}, which differs: "
        f"{real.family}, {real.num_layers} layers of {real.hidden_size}, {parameters(real):,} parameters"
    )


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Return the shape without what a preset leaves to the tokenizer, and without equal values in other words."""
    shape = shape_of(replace(model, head_dim=model.kv_channels, vocab_size=0))
    return {name: value for name, value in shape.items() if name != "max_position"}
