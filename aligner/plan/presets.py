"""Shapes of published models whose folders are not here: those of conf/model, by the name of the folder."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

from aligner.config.options import from_plain
from aligner.config.sections.model.config import ModelConfig
from aligner.files import conf_dir


@cache
def preset_of(folder: str) -> ModelConfig | None:
    """Return the shape of models/Qwen/Qwen3-32B from the file of conf/model whose first line names Qwen/Qwen3-32B; None
    if none does."""
    name = "/".join(Path(folder).parts[-2:])
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if name in re.findall(r"[\w.-]+/[\w.-]*\w", text.partition("\n")[0]):
            return from_plain(ModelConfig, yaml.safe_load(text), "model")
    return None
