"""Refusal of keys that a user set and that the stage does not read: they would do nothing.

The project's own files never count, as they are for all stages. `?` before an override marks it as for several
stages: `?critic.optim.lr=1e-5` is read by stages that know it, and `?experiment=mine` is such a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode

from aligner.config.foreign_names import known_elsewhere
from aligner.config.identity import uses
from aligner.config.options import GROUPS, REUSED, in_free_dict, key_type, nearest
from aligner.config.resolve import chooses, compose, hydra, searched, single
from aligner.config.schema import Config
from aligner.config.sections.model.config import RUNS
from aligner.config.stages import STAGES
from aligner.errors import ConfigError
from aligner.files import conf_dir


def compose_run(overrides: list[str], *, config_dir: str | None = None) -> Config:
    """Call `compose` for a command that runs the stage. Raises ConfigError also for keys that the stage does not
    read."""
    cfg = compose(overrides, config_dir=config_dir)
    refuse_unread(cfg, overrides, config_dir)
    return cfg


def refuse_unread(cfg: Config, overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Raise ConfigError for the first key that these overrides, or the user's files that they choose, set and that
    the config's stage does not read; or if both run.steps and run.epochs set its length."""
    stage, settings = cfg.stage.name, dict(set_by_user(overrides, config_dir))
    for key, (value, file) in settings.items():
        if not uses(stage, key) and key_type(key) is not None:
            raise _unread(stage, key, value, file)
    steps, file = settings.get("run.steps", (None, ""))
    _, file_of_epochs = settings.get("run.epochs", (None, ""))
    if cfg.run.epochs and steps is not None and (file_of_epochs or not file):  # typed epochs override a file's steps
        expected = f"no value with run.epochs={cfg.run.epochs:g}, from which it follows"
        raise ConfigError("run.steps", steps, expected, "To count steps: run.epochs=0.")


def refuse_tasks(overrides: Sequence[str]) -> None:
    """Raise ConfigError for suites among overrides of `aligner eval`, which does not run them. Those of a run's own
    config are its stage's."""
    for key, (value, file) in set_by_user(overrides):
        if key.startswith("eval.tasks") and not file:
            expected = "no value with `aligner eval`, which measures rows of data.eval"
            hint = "A stage's evaluations run tasks; `aligner serve` answers a suite's own command"
            raise ConfigError(key, value, expected, f"{hint} (docs/how-to/evaluate.md).")


def shape_asked(overrides: Sequence[str], config_dir: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the keys of the model's shape that were set, with their values, except those in a preset; and the
    preset's name."""
    settings = {k: v for k, (v, file) in set_by_user(overrides, config_dir) if Path(file).parent.name != "model"}
    others = tuple(f"model.{name}." for name in RUNS)
    keys = [key for key in settings if key.startswith("model.") and not f"{key}.".startswith(others)]
    presets = [text.partition("=")[2] for text in overrides if text.startswith(("model=", "+model="))]
    return {key: settings[key] for key in keys}, presets[-1] if presets else ""


def set_by_user(overrides: Sequence[str], config_dir: str | None = None) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield key -> its value, and its file ("" for the command line)."""
    with hydra():
        parsed = single(list(overrides))
        yield from _in_files([o for o in parsed if chooses(o)], config_dir)
    for override in parsed:
        if not (chooses(override) or _shared(override)):
            yield override.key_or_group, (override.value(), "")


def _shared(override: Override) -> bool:
    return str(override.input_line).startswith("?")


def _in_files(choices: Sequence[Override], config_dir: str | None) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the settings in the files of these choices, except the project's own."""
    texts, folders = searched(choices, config_dir)
    if not folders:
        return
    loader = GlobalHydra.instance().config_loader()
    files = loader.compute_defaults_list("config", list(texts), RunMode.RUN).defaults
    marked = [f"{o.key_or_group}/{o.value()}" for o in choices if _shared(o)]
    for file in files:
        path = next((p for f in folders if (p := f / f"{file.config_path}.yaml").is_file()), None)
        if path is None or (conf_dir() / f"{file.config_path}.yaml").is_file() or _below(file, files, marked):
            continue
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            content.pop("defaults", None)
            prefix = f"{file.package}." if file.package else ""
            for key, value in _leaves(content, prefix):
                yield key, (value, str(path))


def _below(file: ResultDefault, files: Sequence[ResultDefault], marked: Sequence[str]) -> bool:
    """Return whether it is one of the marked files, or included by one."""
    parents = {f.config_path: f.parent for f in files if f.config_path != f.parent}
    path: str | None = file.config_path
    while path:
        if path in marked:
            return True
        path = parents.get(path)
    return False


def _leaves(content: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not in_free_dict(f"{key}.x"):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _may_be_meant(name: str, key: str) -> bool:
    """Return whether a key may be suggested for another one: a key of a section that is used twice, only if that
    place was named."""
    owner = name.partition(".")[0]
    return name not in GROUPS and (owner not in REUSED or owner == key.partition(".")[0])


def _unread(stage: str, key: str, value: Any, file: str) -> ConfigError:
    others = [name for name in STAGES if uses(name, key)]
    able = f"; {', '.join(others)} {'reads' if len(others) == 1 else 'read'} this one" if others else ""
    near = nearest(key, stage=stage, reads=lambda name: _may_be_meant(name, key) and uses(stage, name)) or ""
    alike = near.rpartition(".")[2] == key.rpartition(".")[2] or near == known_elsewhere(key, stage)
    hint = f"Did you mean `{near}`? " if near and alike else ""
    hint += (
        f"For a recipe of several stages: '?{key}=...'" if not file else "For a recipe of several stages: '?' before"
    )
    if file:
        hint += f" the choice of {file}"
    return ConfigError(key, value, f"a key that stage {stage} reads{able}", f"{hint}.")
