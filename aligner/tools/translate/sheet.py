"""The state of one translation: another trainer's values by name, the settings that follow, and names without one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aligner.config.foreign_names import known_elsewhere
from aligner.config.identity import uses
from aligner.config.options import in_free_dict, key_type, nearest
from aligner.config.sections.logging import TRACKERS
from aligner.errors import ConfigError
from aligner.files import conf_dir
from aligner.tools.published_rows import PUBLISHED

_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off", "none")
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "a mapping"}


# transformers' names of schedules -> ours
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_UNREAD = (("no effect beside the other values", True), ("an addition to the trainer's own names", False))


@dataclass(frozen=True)
class Vocabulary:
    """Names of one trainer's command. `defaults` has those that are translated: a default that decides the result, or
    the type of a value that counts only where it is written. The others are patterns with a remark."""

    trainer: str  # with its version
    defaults: Mapping[str, Any]
    needless: Mapping[str, str] = field(default_factory=dict)  # what this project does instead
    missing: Mapping[str, str] = field(default_factory=dict)  # what to do instead

    def remark(self, name: str) -> tuple[str, bool] | None:
        """Return the remark on a name, and whether it is one of `needless`."""
        for patterns, needless in ((self.needless, True), (self.missing, False)):
            for pattern, remark in patterns.items():
                if fnmatchcase(name, pattern):
                    return remark, needless
        return None

    def typed(self, name: str, value: Any) -> Any:
        """Return a value of a name that is translated. Raises ConfigError for another type."""
        default = self.defaults[name]
        kind = default if isinstance(default, type) else type(default)
        if value is None or kind is object:
            return value
        try:
            return _as(kind, value)
        except (TypeError, ValueError):
            raise ConfigError(name, value, f"{_KINDS[kind]}, as {self.trainer} reads it") from None

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for the first name that this trainer does not have."""
        known = [*self.defaults, *self.needless, *self.missing]
        unknown = [name for name in values if name not in self.defaults and not self.remark(name)]
        if unknown:
            whole = [one for one in known if "*" not in one]
            ends = {one.rpartition(".")[2]: one for one in whole}
            near = difflib.get_close_matches(unknown[0], [*whole, *ends], n=1)
            hint = f"Did you mean `{ends.get(near[0], near[0])}`?" if near else "Remove it."
            hint += f" Also unknown: {', '.join(unknown[1:])}." if unknown[1:] else ""
            raise ConfigError(unknown[0], values[unknown[0]], f"a name of {self.trainer}", hint)


def remarks(table: str) -> dict[str, str]:
    """Return pattern -> remark of lines `pattern ... => remark`, which further lines with blanks continue."""
    lines = table.replace("\n    ", " ").strip().splitlines()
    rows = [line.partition(" => ") for line in lines]
    return {pattern: remark for patterns, _, remark in rows for pattern in patterns.split()}


def _as(kind: type, value: Any) -> Any:
    if kind is bool:
        text = str(value).lower()
        if text not in _TRUE + _FALSE:
            raise ValueError
        return text in _TRUE
    if kind in (int, float):
        if isinstance(value, bool) or (kind is int and float(value) != int(float(value))):
            raise ValueError
        return kind(float(value)) if kind is int else float(value)
    if kind is str:
        if isinstance(value, dict | list):
            raise TypeError
        return str(value)
    if isinstance(value, str):
        value = json.loads(value) if value[:1] in ("[", "{") else value.split() if kind is list else value
    if kind is list and not isinstance(value, list):
        value = [value]
    if not isinstance(value, kind):
        raise TypeError
    return value


@dataclass
class Setting:
    value: Any
    sources: list[str]  # name=value of the other trainer
    written: bool  # in its file; else a default of that trainer
    note: str = ""


class Sheet:
    def __init__(
        self,
        vocabulary: Vocabulary,
        values: Mapping[str, Any],
        stage: str,
        labels: Mapping[str, str] | None = None,
        added: Collection[str] = (),
    ):
        self.labels = labels or {}  # name -> how the file calls it
        self.added = added  # to the trainer's own names
        vocabulary.check({name: value for name, value in values.items() if self.labels.get(name, name) not in added})
        self.vocabulary, self.stage = vocabulary, stage
        self.values = {n: vocabulary.typed(n, v) if n in vocabulary.defaults else v for n, v in values.items()}
        self.settings: dict[str, Setting] = {}
        self.groups: dict[str, str] = {"stage": stage}
        self.chosen: list[str] = []  # lines of the report
        self.without: dict[str, str] = {}  # name=value, or a topic -> why nothing stands for it
        self.needless: dict[str, str] = {}
        self.downloads: list[str] = []
        self._used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name: from the file, else the trainer's default; None where it has none."""
        if self.values.get(name) is not None:
            return self.values[name]
        default = self.vocabulary.defaults[name]
        return None if isinstance(default, type) or name in self.values else default

    def written(self, *names: str) -> bool:
        return any(self.values.get(name) is not None for name in names)

    def put(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set our `key` to what follows from these names."""
        written = self.written(*names)
        self._used |= set(names)
        if not uses(self.stage, key) and key not in ("data.columns.answer",):
            if written:
                self.lack(names, f"stage {self.stage} does not read {key}")
            return
        sources = [self._written_as(name) + " (default)" * (not self.written(name)) for name in names]
        self.settings[key] = Setting(value, sources, written, note)

    def take(self, name: str, convert: Callable[[Any], Any] | None = None, note: str = "") -> None:
        """Set the key that stands for `name` in `foreign_names`. `convert` makes our value; a mapping's missing entry,
        or None, means that there is none."""
        value = self[name]
        if value is None:
            return
        key, equals, fixed = known_elsewhere(name, self.stage).partition("=")
        key = key or nearest(name, stage=self.stage) or ""
        assert is_known(key), name
        result = convert(value) if convert else value
        if equals:
            if not result:
                self._used.add(name)
                return
            result = _fixed(fixed)
        if isinstance(result, list) and key in self.settings and key.startswith("memory."):
            result = [*self.settings[key].value, *result]
        if result is None:
            self.lack((name,), f"no {key} of this meaning")
        else:
            self.put(key, result, name, note=note)

    def _written_as(self, name: str) -> str:
        value = self.values.get(name)
        return f"{self.labels.get(name, name)}={text(self[name] if value is None else value)}"

    def track(self, name: str, trackers: Iterable[str], project: str) -> None:
        """Set the trackers that report to servers, and the project there."""
        known = [tracker for tracker in trackers if tracker in TRACKERS]
        if set(known) - {"tensorboard"}:
            self.put("logging.trackers", list(dict.fromkeys(["tensorboard", *known])), name)
            self.put("logging.offline", False, name)
            if self[project]:
                self.put("logging.project", self[project], project)

    def choose(self, group: str, option: str, name: str) -> None:
        """Choose an option of a group of our config."""
        self.groups[group] = option
        self._used.add(name)
        self.chosen.append(f"{self._written_as(name)} -> {group}={option}")

    def lack(self, names: Iterable[str], why: str) -> None:
        """Report names for which there is nothing, as far as they are in the file."""
        for name in names:
            self._used.add(name)
            if self.written(name):
                self.without[self._written_as(name)] = why

    def drop(self, names: Iterable[str], why: str) -> None:
        """Report names that need no setting, as far as they are in the file and have not been used."""
        for name in [name for name in names if name not in self._used]:
            self._used.add(name)
            if self.written(name):
                self.needless[self._written_as(name)] = why

    def finish(self) -> None:
        """Report all names of the file that no call has mentioned."""
        for name in [name for name in self.values if name not in self._used]:
            why, needless = self.vocabulary.remark(name) or _UNREAD[name not in self.vocabulary.defaults]
            (self.drop if needless else self.lack)([name], why)

    def model(self, name: str, key: str = "model.init") -> None:
        """Set the folder of a model. One of the Hub is to be downloaded; its shape may be in conf/model."""
        value = self[name]
        if not value:
            raise ConfigError(name, value, "the model to train")
        self.put(key, self.folder(str(value), "models"), name)
        if key == "model.init" and (preset := preset_of(str(value))):
            self.choose("model", preset, name)

    def data(self, name: str, evaluated: bool = False) -> None:
        """Set the folder of a dataset. One of the Hub is to be downloaded; this project may know its rows."""
        value = self[name]
        if not value:
            raise ConfigError(name, value, "the dataset to train on")
        known = [dataset for dataset, published in PUBLISHED.items() if published.repository == value]
        if known:
            self.choose("data", known[0], name)
            self.downloads += [
                f"hf download --repo-type dataset {value} --local-dir downloads/{known[0]}",
                f"aligner data {known[0]} downloads/{known[0]}",
            ]
            return
        path = self.folder(str(value))
        self.put("data.train", path, name)
        if evaluated and path.startswith("downloads/"):
            self.put("data.eval", path, name, note="its split validation or test")

    def folder(self, value: str, folder: str = "downloads") -> str:
        """Return a path as it is, and for a repository of the Hub the folder to download it to."""
        if value.count("/") != 1 or value.startswith((".", "/", "~")) or Path(value).exists():
            return value
        kind = "--repo-type dataset " * (folder == "downloads")
        self.downloads.append(f"hf download {kind}{value} --local-dir {folder}/{value}")
        return f"{folder}/{value}"


def sources(paths: list[str]) -> list[dict[str, str]]:
    """Return entries of data.sources. Where files have the same name, their folders tell them apart, or else
    numbers."""
    labels = [Path(path).name.partition(".")[0] for path in paths]
    if len(set(labels)) < len(labels):
        labels = [f"{Path(path).parent.name}_{label}" for path, label in zip(paths, labels, strict=True)]
    if len(set(labels)) < len(labels):
        labels = [f"{label}_{number}" for number, label in enumerate(labels, 1)]
    return [{"path": path, "name": label} for path, label in zip(paths, labels, strict=True)]


def preset_of(repository: str) -> str:
    """Return the file of conf/model with the shape of this repository, or of the one whose instructions it follows."""
    stem = repository.rpartition("/")[2]
    names = {stem, *(stem.removesuffix(ending) for ending in ("-Instruct", "-Base", "-it", "-Instruct-2507"))}
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        if any(word.rpartition("/")[2].rstrip(",;") in names for word in first.split() if "/" in word):
            return path.stem
    return ""


def _fixed(value: str) -> Any:
    return [value[1:-1]] if value.startswith("[") else value


def share(of: float, fraction: float) -> float:
    """Return a product without the digits that binary numbers add to it."""
    return float(f"{of * fraction:.9g}")


def text(value: Any) -> str:
    """Return a value as one writes it in YAML."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def is_known(key: str) -> bool:
    return key_type(key) is not None or in_free_dict(key)
