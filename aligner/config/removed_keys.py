"""Removed and renamed keys, in files of an earlier version (a frozen config.yaml, a checkpoint's definition) and on a
command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.config.engines import ENGINES
from aligner.errors import ConfigError


@dataclass(frozen=True)
class RemovedKey:
    without: Any  # the value that means the same as no key; it is ignored
    reason: str
    instead: str = "Leave the key out."


REMOVED = {
    "logging.tensorboard": RemovedKey(
        True, "it was removed, as logging.trackers names all trackers", "Set logging.trackers, [] for none."
    ),
    "logging.wandb.mode": RemovedKey(
        "disabled",
        "it was removed, as logging.trackers names all trackers",
        "Set logging.trackers=[tensorboard,wandb], and logging.offline.",
    ),
    "engine.spares": RemovedKey(
        0,
        "it was removed, as it worked only under `aligner launch`: srun ends a job with the first rank that fails",
        "Leave the key out; a run that lost an engine resumes from its last checkpoint when you start it again.",
    ),
    "refit.skip_unchanged": RemovedKey(
        False,
        "it was removed, as finding what changed took 2.4 to 2.9 times as long as sending everything",
        "Leave the key out; engine.tensor_parallel and refit.adapters=factors reduce what is sent.",
    ),
    "refit.transport": RemovedKey(
        "messages",
        "it was removed, as windows of MPI saved at most a tenth of a refit and took host memory for all that is sent",
    ),
}


# sections that had to equal another one, which is now read instead
COPIES = {"critic.parallel": "parallel"}
RENAMED = {
    "logging.wandb.project": "logging.project",
    "engine.vllm.sleep": "engine.sleep",
    "engine.trtllm.sleep": "engine.sleep",
    "engine.vllm.sleep_weights": "engine.sleep_weights",
    "engine.trtllm.sleep_weights": "engine.sleep_weights",
    "engine.vllm.cuda_graphs": "engine.cuda_graphs",
    "engine.trtllm.cuda_graphs": "engine.cuda_graphs",
}

# modules of the examples, which the package had
MOVED = {"aligner.tools.sums": "examples/sums.py", "aligner.tools.calculator": "examples/calculator.py"}


def moved(path: str) -> str:
    """Return the current place of `module:name`."""
    module, colon, name = path.rpartition(":")
    return f"{MOVED.get(module, module)}{colon}{name}"


def copied(key: str) -> str:
    """Return the key that is read instead of this one, of a section that had to equal another; "" if there is none."""
    keys = (f"{other}{key.removeprefix(gone)}" for gone, other in COPIES.items() if f"{key}.".startswith(f"{gone}."))
    return next(keys, "")


def passed_over(key: str, value: Any) -> bool:
    """Return whether `key` was removed and `value` means the same as no key. Raises ConfigError for another value."""
    removed = REMOVED.get(key)
    if removed is not None and value != removed.without:
        raise ConfigError(key, value, f"no value but {removed.without!r}: {removed.reason}", removed.instead)
    return removed is not None


def current(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier version's config, nested, with the current keys."""
    kept = _kept(_with_trackers(data))
    for key, other in COPIES.items():
        owner, _, name = key.partition(".")
        copy = kept[owner].pop(name, None) if isinstance(kept.get(owner), dict) else None
        if copy is not None and copy != kept.get(other):
            raise ConfigError(key, copy, f"the same as {other}, which is read instead", "Leave the key out.")
    engine = kept.get("engine")
    if isinstance(engine, dict) and engine.get("name") in ENGINES:
        for key in RENAMED:
            _, section, name = key.split(".")
            options = engine.get(section)
            value = options.pop(name, None) if isinstance(options, dict) else None
            if value is not None and section == ENGINES[engine["name"]].section:
                engine[name] = value
    return kept


def _with_trackers(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data with `logging.trackers` for the keys that each tracker had."""
    logging = data.get("logging")
    if not isinstance(logging, dict) or "trackers" in logging or not {"tensorboard", "wandb"} & logging.keys():
        return data
    kept, mode = dict(logging), "disabled"
    kept["trackers"] = ["tensorboard"] if kept.pop("tensorboard", True) else []
    if isinstance(wandb := kept.pop("wandb", {}), dict):
        mode = wandb.get("mode", mode)
        kept["project"] = wandb.get("project", "aligner")
        kept["args"] = {"wandb": {"entity": wandb["entity"]}} if mode != "disabled" and wandb.get("entity") else {}
    if mode != "disabled":
        kept["trackers"].append("wandb")
        kept["offline"] = mode == "offline"
    return {**data, "logging": kept}


def _kept(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the data without removed keys."""
    kept = {}
    for name, value in data.items():
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            kept[name] = _kept(value, f"{prefix}{name}.")
        elif not passed_over(f"{prefix}{name}", value):
            kept[name] = value
    return kept
