"""Checks of a single value; each raises ConfigError with its key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError


def one_of(key: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ConfigError(key, value, "one of " + ", ".join(map(str, allowed)))


def at_least(key: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(key, value, f"a number >= {low}")


def above(key: str, value: float, low: float) -> None:
    if not value > low:
        raise ConfigError(key, value, f"a number > {low}")


def within(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(key, value, f"a number in [{low}, {high}]")


def exists(key: str, path: str) -> None:
    """Raise ConfigError if there is nothing at the path."""
    if not Path(path).expanduser().exists():
        raise ConfigError(key, path, "a path that exists", hub_hint(key, path))


def hub_hint(key: str, path: str) -> str:
    """What to do with a name of the Hub in place of a path; empty for what does not look like one."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) or Path(path).suffix in (".jsonl", ".json", ".parquet"):
        return ""
    kind = "--repo-type dataset " if key.startswith("data.") else ""
    return f"Nothing is fetched from the Hub: hf download {kind}{path} --local-dir FOLDER, then {key}=FOLDER."
