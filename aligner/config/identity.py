"""Identity of a run, compared with its checkpoint at every start.

A run's definition is flat: config keys, and hashes of the contents of its paths ("content of data.train"). Each key
of the schema declares what a new value means for a resumed run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from typing import Any

from aligner.config.key import IGNORE, REFUSE, REPORT
from aligner.config.options import leaves
from aligner.config.schema import Config
from aligner.config.stages import STAGES

CONTENT = "content of "  # before the key of a path
# paths whose content may change; a function or a stage that raised must be repaired before the run resumes
_OTHER_CONTENT = ("algorithm", "data.eval", "environment", "reward.functions", "stage.name")


@dataclass(frozen=True)
class Change:
    key: str
    was: Any
    now: Any
    effect: str  # REFUSE, REPORT, IGNORE

    def __str__(self) -> str:
        return f"{self.key} {_short(self.was)} -> {_short(self.now)}"


@cache
def effect_of(key: str) -> str:
    """Return what a new value of `key`, or another content, means for a resumed run."""
    if key.startswith(CONTENT):
        path = key.removeprefix(CONTENT)
        return REPORT if any(path == known or path.startswith(f"{known}.") for known in _OTHER_CONTENT) else REFUSE
    return leaves()[key].facts.resume


def definition(cfg: Config, contents: Mapping[str, str]) -> dict[str, Any]:
    """Return the definition, flat and as JSON returns it. `contents`: key of a path -> hash of what is there."""
    stage = cfg.stage.name

    counts = {REFUSE: reads, REPORT: uses, IGNORE: lambda stage, key: False}
    values = {key: value for key, value in flat(cfg) if counts[effect_of(key)](stage, key)}
    values |= {f"{CONTENT}{key}": digest for key, digest in contents.items()}
    return json.loads(json.dumps(values))


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the differences, in the schema's order. A key that was missing had its default, as an earlier version
    did not know it. Removed keys, and keys that the stage does not read, make no difference."""
    defaults = dict(flat(Config()))
    differences = []
    for key in [*now, *(key for key in was if key not in now and key.startswith(CONTENT))]:
        there, here = (_essence(key, side[key] if key in side else defaults.get(key)) for side in (was, now))
        if there != here:
            differences.append(Change(key, there, here, effect_of(key)))
    return differences


def flat(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Yield dotted key -> value as plain data; of an element of a list only what defines it."""
    for key in leaves():
        if "[]" not in key:
            value: Any = cfg
            for name in key.split("."):
                value = getattr(value, name)
            if isinstance(value, list):
                value = _essence(key, [asdict(element) if is_dataclass(element) else element for element in value])
            yield key, value


def _essence(key: str, value: Any) -> Any:
    """Return sections in a list without irrelevant fields (the location of a path), defaults and former keys."""
    if isinstance(value, list):
        return [_essential(f"{key}[]", element) if isinstance(element, dict) else element for element in value]
    return value


def _essential(prefix: str, element: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in element.items():
        leaf = leaves().get(f"{prefix}.{name}")
        if leaf is None and isinstance(value, dict):
            kept |= {name: inner} if (inner := _essential(f"{prefix}.{name}", value)) else {}
        elif leaf is not None and leaf.facts.resume != IGNORE and value != leaf.default:
            kept[name] = value
    return kept


@cache
def reads(stage: str, key: str) -> bool:
    """Return whether a key affects what this stage trains."""
    return _read(key, STAGES[stage].purposes | {f"stage.{stage}"})


@cache
def uses(stage: str, key: str) -> bool:
    """Return whether this stage reads a key at all: its training, or its evaluation."""
    evaluation = {"evaluation"} if STAGES[stage].answers else set()
    return _read(key, STAGES[stage].purposes | {f"stage.{stage}"} | evaluation)


def _read(key: str, purposes: set[str]) -> bool:
    """Return whether a key is read; of a section: any of its keys; within a key: that key."""
    known = leaves()
    within = [name for name in known if f"{name}.".startswith(f"{key}.")]
    around = [name for name in known if f"{key}.".startswith(f"{name}.")]
    read_for = [known[name].facts.read_for for name in within or around]
    return not read_for or any(not wanted or purposes & set(wanted) for wanted in read_for)


def _short(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
