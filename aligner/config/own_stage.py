"""A stage in a user's file: its defaults as a file of conf/stage would have them, and its own keys, `stage.args`."""

from __future__ import annotations

import hashlib
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from aligner.config.engines import entry_of
from aligner.config.key import Section
from aligner.config.options import from_plain, key_type, leaves, nearest
from aligner.config.schema import Config
from aligner.config.stage import OWN, Stage
from aligner.errors import ConfigError, StageCodeError, UnknownKeyError

ARGS = "stage.args"


def store_defaults(path: str, stage: Stage) -> str:
    """Store the defaults of the stage in this file for Hydra; return the option of group `stage` that they are now.
    Raises UnknownKeyError, ConfigError, StageCodeError."""
    _check(path, stage)
    node: dict[str, Any] = {}
    name = Path(path).stem if path.endswith(".py") else path.rpartition(".")[2]
    for key, value in {"stage.name": path, "run.name": name, **stage.defaults}.items():
        if key_type(key) is None:
            raise UnknownKeyError(key, nearest(key))
        if key == "stage.name" and value != path:
            raise ConfigError("stage.name", value, f"no default of stage={path}")
        *above, last = key.split(".")
        section = node
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    name = hashlib.sha256(path.encode()).hexdigest()[:12]  # the path may have letters that Hydra's grammar has not
    # below `stage`, so that a message about a wrong stage does not list it
    ConfigStore.instance().store(group="stage/outside", name=name, node=node, package="_global_")
    return f"outside/{name}"


def _check(path: str, stage: Stage) -> None:
    """Check the names and types that STAGE gives. Raises StageCodeError."""
    purposes = {purpose for leaf in leaves().values() for purpose in leaf.facts.read_for or ()} | {OWN}
    if unknown := sorted(set(stage.reads) - purposes):
        names = ", ".join(sorted(name for name in purposes if name != OWN and "." not in name))
        raise StageCodeError(f"stage={path!r}: STAGE has reads with {unknown[0]!r}: expected one of {names}")
    if stage.section is not None and not (is_dataclass(stage.section) and issubclass(stage.section, Section)):
        raise StageCodeError(
            f"stage={path!r}: STAGE has section={stage.section!r}: expected a class with @dataclass that begins "
            f'`class MyConfig(api.Section, key="{ARGS}")`'
        )


def typed_args(cfg: Config) -> Any:
    """Return `stage.args` as the section of the stage, None without one. Raises ConfigError, UnknownKeyError."""
    return _typed(cfg.stage.its.section, ARGS, cfg.stage.args, f"STAGE of {cfg.stage.name}")


def engine_args(cfg: Config) -> Any:
    """Return `engine.args` likewise, as the section of a user's engine."""
    return _typed(entry_of(cfg.engine.name).args, "engine.args", cfg.engine.args, f"engine.name={cfg.engine.name}")


def _typed(kind: type | None, key: str, args: dict[str, Any], owner: str) -> Any:
    if kind is None:
        if args:
            raise ConfigError(key, args, f"no entries: {owner} has no section")
        return None
    try:
        return from_plain(kind, args, key, kind)
    except UnknownKeyError as error:
        near = nearest(error.key.removeprefix(f"{key}."), kind)
        raise UnknownKeyError(error.key, near and f"{key}.{near}") from None
