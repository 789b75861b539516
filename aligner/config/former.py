"""Keys that were removed or renamed, in what an earlier version wrote: a frozen config.yaml, a checkpoint's definition,
a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.config.engines import ENGINES
from aligner.errors import ConfigError


@dataclass(frozen=True)
class Removed:
    without: Any  # the value that says what is the case without the key, which is passed over
    reason: str
    instead: str = "Leave the key out."


REMOVED = {
    "engine.spares": Removed(
        0,
        "it was removed, as it worked under `aligner launch` alone: srun ends a job with the first rank that fails",
        "Leave the key out; a run that lost an engine goes on from its last checkpoint when it is started again.",
    ),
    "refit.skip_unchanged": Removed(
        False,
        "it was removed, as finding what changed took 2.4 to 2.9 times as long as sending everything",
        "Leave the key out; engine.tensor_parallel and refit.adapters=factors make what is sent smaller.",
    ),
    "refit.transport": Removed(
        "messages",
        "it was removed, as windows of MPI saved at most a tenth of a refit and took host memory for all that is sent",
    ),
}


# sections that had to be as another one, which is now read in their place
COPIES = {"critic.parallel": "parallel"}
RENAMED = {
    "engine.vllm.sleep": "engine.sleep",
    "engine.trtllm.sleep": "engine.sleep",
    "engine.vllm.cuda_graphs": "engine.cuda_graphs",
    "engine.trtllm.cuda_graphs": "engine.cuda_graphs",
}

# modules of the examples, which the package had
MOVED = {"aligner.tools.sums": "examples/sums.py", "aligner.tools.calculator": "examples/calculator.py"}


def moved(path: str) -> str:
    """Where `module:name` is now."""
    module, colon, name = path.rpartition(":")
    return f"{MOVED.get(module, module)}{colon}{name}"


def copied(key: str) -> str:
    """The key that is read in the place of this one, of a section that had to be as another; empty: none."""
    found = (f"{other}{key.removeprefix(gone)}" for gone, other in COPIES.items() if f"{key}.".startswith(f"{gone}."))
    return next(found, "")


def passed_over(key: str, value: Any) -> bool:
    """Whether `key` was removed and `value` says what is the case without it. Raises ConfigError for another value."""
    removed = REMOVED.get(key)
    if removed is not None and value != removed.without:
        raise ConfigError(key, value, f"no value but {removed.without!r}: {removed.reason}", removed.instead)
    return removed is not None


def current(data: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier version's config, nested, with the keys of now."""
    kept = _kept(data)
    for key, other in COPIES.items():
        owner, _, name = key.partition(".")
        copy = kept[owner].pop(name, None) if isinstance(kept.get(owner), dict) else None
        if copy is not None and copy != kept.get(other):
            raise ConfigError(key, copy, f"the same as {other}, which is read in its place", "Leave the key out.")
    engine = kept.get("engine")
    if isinstance(engine, dict) and engine.get("name") in ENGINES:
        for key in RENAMED:
            _, section, name = key.split(".")
            options = engine.get(section)
            value = options.pop(name, None) if isinstance(options, dict) else None
            if value is not None and section == ENGINES[engine["name"]].section:
                engine[name] = value
    return kept


def _kept(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Without the keys that were removed."""
    kept = {}
    for name, value in data.items():
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            kept[name] = _kept(value, f"{prefix}{name}.")
        elif not passed_over(f"{prefix}{name}", value):
            kept[name] = value
    return kept
