"""Checks of a single value; each raises ConfigError with its key."""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError


def all_finite(section: Any, key: str = "") -> None:
    """Check that all numbers of a config and its sections are finite. A limit may be infinite: never reached. Free
    dictionaries are checked by their readers."""
    limit = key.endswith(("above", "below"))
    if isinstance(section, float) and not math.isfinite(section) and not (limit and math.isinf(section)):
        raise ConfigError(key, section, "a finite number")
    if isinstance(section, list):
        for i, item in enumerate(section):
            all_finite(item, f"{key}[{i}]")
    if is_dataclass(section):
        for f in fields(section):
            all_finite(getattr(section, f.name), f"{key}.{f.name}" if key else f.name)


def one_of(key: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ConfigError(key, value, "one of " + ", ".join(map(str, allowed)))


def different(names: list[str], alone: str = "") -> bool:
    """Return whether there are names, each once, and the name `alone` only without others."""
    return bool(names) and len(set(names)) == len(names) and (alone not in names or len(names) == 1)


def at_least(key: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(key, value, f"a number >= {low}")


AUTO = "auto"
Auto = int | str  # a key's integer, or `auto`
Switch = bool | str  # a key's true or false, or `auto`


DATA_FILES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


def exists(key: str, path: str) -> None:
    """Raise ConfigError if there is nothing at the path."""
    if not Path(path).expanduser().exists():
        raise ConfigError(key, path, "a path that exists", path_hint(key, path))


def path_hint(key: str, path: str) -> str:
    """Return advice for a missing path of a recipe, of a name of the Hub, or a relative one; "" for others."""
    if own := re.fullmatch(r"models/([\w.-]+/[\w.-]+)", path):
        return f"It is relative to {Path.cwd()}. To download it: hf download {own[1]} --local-dir {path}"
    if own := re.fullmatch(r"data/(\w+)/(train|eval)\.jsonl", path):
        return f"It is relative to {Path.cwd()}. Made by: aligner data {own[1]} FOLDER, with the downloaded dataset."
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) or path.endswith(DATA_FILES):
        return "" if Path(path).expanduser().is_absolute() else f"It is relative to {Path.cwd()}."
    kind = "--repo-type dataset " if key.startswith("data.") else ""
    return f"Nothing is fetched from the Hub: hf download {kind}{path} --local-dir FOLDER, then {key}=FOLDER."
