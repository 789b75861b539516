"""Checks of a single value; each raises ConfigError with its key."""

from __future__ import annotations

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
