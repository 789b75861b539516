"""The resolved config as a file in the run folder, which every rank and every requeue reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from aligner.config.engines import entry_of
from aligner.config.identity import flat, reads
from aligner.config.options import from_plain, leaves
from aligner.config.schema import Config
from aligner.errors import ConfigError
from aligner.families import refuse_foreign
from aligner.foreign import MAX_DEPTH
from aligner.user_code import is_path, is_source, source_files

FILE_NAME = "config.yaml"
PENDING_NAME = "config.pending.yaml"  # of a start in a used folder that may still be refused; the lock holder's
_NOT_HASHED = ("dir", "name", "resume", "accept_changes")  # of `run`: they do not change its results


# libyaml's are ten times as fast; PyYAML may be built without it. It refuses halves of surrogate pairs, which Python
# makes of file names that are no UTF-8: PyYAML's own know them.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _OwnDumper(yaml.SafeDumper):
    pass


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
    pass


def _text(dumper: _Dumper | _OwnDumper, text: str) -> yaml.ScalarNode:
    """Represent a text with Unicode's line breaks quoted. PyYAML writes them plainly and then reads a blank; quoted
    and escaped they survive."""
    style = '"' if any(c in text for c in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _kind in (_OwnDumper, _Dumper):
    _kind.add_representer(str, _text)


def to_yaml(cfg: Config) -> str:
    """Return the resolved config, keys in the schema's order. Long strings stay on one line."""
    data, how = asdict(cfg), {"sort_keys": False, "allow_unicode": True, "width": 10**6}
    try:
        return yaml.dump(data, Dumper=_Dumper, **how)
    except UnicodeEncodeError:
        return yaml.dump(data, Dumper=_OwnDumper, **how)


def from_yaml(text: str | bytes) -> Any:
    """Read what `to_yaml` or a person wrote. Raises yaml.YAMLError, with PyYAML's own message, which is more precise.
    It also raises for aliases, by which a short file stands for a long one, and for nesting so deep that libyaml
    would crash."""
    try:
        return _load(text, _LOADER)
    except yaml.YAMLError:
        return _load(text, yaml.SafeLoader)


def _load(text: str | bytes, loader: Any) -> Any:
    depth = 0
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"expected no aliases, as *{event.anchor}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"expected YAML nested at most {MAX_DEPTH} deep")
    return yaml.load(text, loader)


def freeze(cfg: Config, folder: Path | str, name: str = FILE_NAME) -> Path:
    """Write `folder`/config.yaml (or `name`), atomically: another rank sees the old file or the new one, never a
    half.

    Raises ConfigError for run.dir if the folder cannot be made or written (permissions, a full disk).
    """
    folder = Path(folder)
    path, aside = folder / name, folder / f".{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8") as file:
            file.write(f"# config {config_hash(cfg)}\n{to_yaml(cfg)}")
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError as error:
        with suppress(OSError):  # a read-only file system refuses this too
            aside.unlink(missing_ok=True)
        raise ConfigError("run.dir", str(folder), "a folder that can be written", f"{error.strerror}.") from None
    return path


def freeze_start(cfg: Config) -> Path:
    """Freeze the config into run.dir. A folder that was used before keeps its config.yaml until its checkpoints have
    been accepted (`Run.steps`)."""
    used = (Path(cfg.run.dir) / FILE_NAME).exists()
    return freeze(cfg, cfg.run.dir, PENDING_NAME if used else FILE_NAME)


def job_file(cfgs: Sequence[Config]) -> str:
    """Return the name of a job's config in its run folder, an array's in each one. It depends on the content, so that
    several jobs of one folder, waiting or requeued, each resume with their own."""
    digest = hashlib.sha256("".join(map(to_yaml, cfgs)).encode()).hexdigest()
    return f"config.{digest[:12]}.yaml"


def accept(folder: Path | str) -> None:
    """Make the pending config, if there is one, the folder's config.yaml, as the run resumes with it."""
    pending = Path(folder) / PENDING_NAME
    if pending.exists():
        pending.rename(Path(folder) / FILE_NAME)


def refuse(folder: Path | str) -> None:
    """Remove the pending config of a failed start, so that the next start does not use it."""
    (Path(folder) / PENDING_NAME).unlink(missing_ok=True)


def load_frozen(path: Path | str, foreign: bool = False) -> Config:
    """Read what `freeze` wrote; a folder means the file in it. `foreign`: it may not name a family to import.

    Raises ConfigError if it cannot be read or a value has another type, UnknownKeyError for keys that do not exist.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        data = from_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--frozen", str(path), "a config.yaml that can be read", f"{error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("--frozen", str(path), "a config.yaml written by aligner", reason) from None
    if not isinstance(data, dict):
        raise ConfigError("--frozen", str(path), "a config.yaml written by aligner")
    if foreign:  # nothing is imported that it names
        refuse_foreign((data.get("model") or {}).get("family"), path)
        data.pop("engine", None)
    return from_plain(Config, data)


def config_hash(cfg: Config) -> str:
    """Return 12 hex digits of SHA-256 over the config, without keys that do not change the result (run.dir, run.name,
    run.resume, logging)."""
    data = asdict(cfg)
    del data["logging"]
    for name in _NOT_HASHED:
        del data["run"][name]
    return _short_hash(data)


def rollout_key(cfg: Config) -> str:
    """Return 12 hex digits of SHA-256 over all that the rollouts of a run depend on and that is not the default. That
    is all that changes what is generated, how it is scored (the reward functions' files included) or how the weights
    get there. The layout, the cutting of batches and the time of scoring are not in it."""
    known = leaves()
    data = {key: value for key, value in flat(cfg) if known[key].facts.rollouts is not False}
    changed = {key: value for key, value in data.items() if value != known[key].default}
    return _short_hash(changed, reward_code(cfg) + environment_code(cfg))


def reward_code(cfg: Config) -> bytes:
    """Return the files of the reward functions that are named by file; b"" if there are none."""
    return _code([function.path for function in cfg.reward.functions])


def environment_code(cfg: Config) -> bytes:
    """Return the files of tools and environment likewise."""
    env = cfg.environment
    return _code([*env.tools, env.path, env.reward, *([f"{word}:" for word in env.command[1:]] or [env.agent])])


def outside_code(cfg: Config) -> dict[str, bytes]:
    """Return key -> the file that it names: of a stage, a family, an engine, and functions of `algorithm`, of the
    user's."""
    named = cfg.algorithm.own_functions(partial(reads, cfg.stage.name)) | {"model.family": cfg.model.family}
    named |= {f"data.format={path}": path for path in cfg.data.formats if is_path(path)}
    if is_path(cfg.engine.name):
        named |= {"engine.name": cfg.engine.name, "the engine's class": entry_of(cfg.engine.name).made_by}
    if is_source(cfg.stage.name):
        named["stage.name"] = f"{cfg.stage.name}:main"
    return {key: code for key, path in named.items() if (code := _code([path]))}


def _code(paths: Sequence[str]) -> bytes:
    """Return the files at these paths, module.py:name, with those beside them that they import."""
    return b"".join(file.read_bytes() for path in paths for file in source_files(path.rpartition(":")[0]))


def _short_hash(data: dict[str, Any], code: bytes = b"") -> str:
    text = json.dumps(_canonical(data), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode() + code).hexdigest()[:12]


def _canonical(value: Any) -> Any:
    """Return a value that JSON can sort: it sorts keys only if they are of one type, and free dictionaries may mix
    types below their first level."""
    if isinstance(value, dict):
        return {k if isinstance(k, str) else repr(k): _canonical(v) for k, v in value.items()}
    return [_canonical(v) for v in value] if isinstance(value, list) else value
