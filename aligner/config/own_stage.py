"""A stage in a user's file: its defaults as a file of conf/stage would have them, and its own keys, `stage.args`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from aligner.config.options import from_plain, key_type, nearest
from aligner.config.schema import Config
from aligner.config.stage import Stage
from aligner.errors import ConfigError, UnknownKeyError

ARGS = "stage.args"


def store_defaults(path: str, stage: Stage) -> str:
    """Store the defaults of the stage in this file for Hydra; return the option of group `stage` that they are now.
    Raises UnknownKeyError, ConfigError."""
    node: dict[str, Any] = {}
    for key, value in {"stage.name": path, "run.name": Path(path).stem, **stage.defaults}.items():
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


def typed_args(cfg: Config) -> Any:
    """Return `stage.args` as the section of the stage, None without one. Raises ConfigError, UnknownKeyError."""
    kind = cfg.stage.its.section
    if kind is None:
        if cfg.stage.args:
            raise ConfigError(ARGS, cfg.stage.args, f"no entries: STAGE of {cfg.stage.name} has no section")
        return None
    try:
        return from_plain(kind, cfg.stage.args, ARGS, kind)
    except UnknownKeyError as error:
        near = nearest(error.key.removeprefix(f"{ARGS}."), kind)
        raise UnknownKeyError(error.key, near and f"{ARGS}.{near}") from None
