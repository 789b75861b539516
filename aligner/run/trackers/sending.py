"""The trackers of a run: what each of them gets, at every start, and what happens when one fails."""

from __future__ import annotations

import inspect
import json
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aligner.config.on_demand import on_demand
from aligner.config.sections.logging import TRACKERS, LoggingConfig
from aligner.errors import AlignerError, ConfigError, MissingExtraError, TrackerCodeError
from aligner.files import write_whole
from aligner.foreign import parse_json, record
from aligner.run.metrics import unwritable
from aligner.run.trackers.tracker import Row, TrackedRun, Tracker
from aligner.user_code import is_path, load

FILE = "trackers.json"
KEY = "logging.trackers"
METHODS = {"start": 1, "log": 2, "samples": 2, "finish": 0}  # and the number of their arguments


class Trackers:
    """All trackers of a run, on rank 0.

    trackers.json has the run's id and the last step that each tracker got. A step is noted before it is sent, so that
    none is sent twice. The steps that a tracker did not get, because it failed or is new, come at the next start.
    """

    def __init__(self, folder: Path, cfg: LoggingConfig, config: Mapping[str, Any]):
        self._path, self._active = folder / FILE, {name: _make(name, cfg) for name in cfg.trackers}
        self._run = TrackedRun("", folder.name, folder, cfg.project, cfg.offline, config, -1)
        self._sent: dict[str, int] = {}
        self._after: dict[str, int] = {}
        self._resumed, self._names = -1, set[str]()  # the step of the checkpoint, and its metrics before this start

    def start(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Begin, or continue the run behind `step`; `records`: of metrics.jsonl up to it. From the first step on (-1)
        it is a new run."""
        run_id, self._sent = self._known() if step >= 0 else ("", {})
        self._run = replace(self._run, id=run_id or uuid.uuid4().hex[:12])
        for name, tracker in self._active.items():
            last = self._sent.get(name, -1)
            self._after[name] = min(last, step) if getattr(tracker, "rewinds", False) else last
        self._note()
        for name in list(self._active):
            self._call(name, "start", replace(self._run, after=self._after[name]))
        for one in records:
            self.log(one["step"], {name: value for name, value in one.items() if name not in ("step", "wall_time")})
            self._resumed, self._names = one["step"], set(one)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        if step == self._resumed:
            numbers = {name: value for name, value in numbers.items() if name not in self._names}
        self._send("log", step, numbers)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        self._send("samples", step, table(records))

    def finish(self) -> None:
        for name in list(self._active):
            self._call(name, "finish")
        self._active = {}

    def _send(self, method: str, step: int, content: Any) -> None:
        for name in [name for name in self._active if self._wants(name, step)]:
            before = self._sent.get(name, -1)
            if step > before:
                self._sent[name] = step
                self._note()
            if not self._call(name, method, step, content):
                self._sent[name] = before
                self._note()

    def _wants(self, name: str, step: int) -> bool:
        """Return whether a tracker gets more of a step: it has none of it yet, or it is the step of the checkpoint,
        evaluated again, and no later one."""
        return step > self._after[name] or step == self._resumed == self._after[name]

    def _call(self, name: str, method: str, *arguments: Any) -> bool:
        """Call a method of a tracker. It may end the run only where the configuration of the tracker is wrong."""
        try:
            getattr(self._active[name], method)(*arguments)
        except Exception as error:
            if method == "start" and isinstance(error, ConfigError):
                raise
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"warning: the tracker {name} gets nothing more before the next start: {text}", file=sys.stderr)
            del self._active[name]
            return False
        return True

    def _known(self) -> tuple[str, dict[str, int]]:
        """Return the id of the run, and the last step that each tracker got."""
        if not self._path.exists():
            return "", {}
        where = str(self._path)
        known = record(parse_json(self._path.read_bytes(), where, AlignerError), where, AlignerError)
        sent = known.record("sent")
        return known.text("id"), {name: sent.integer(name, low=-1) for name in sent.fields}

    def _note(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps({"id": self._run.id, "sent": self._sent}), durable=False)
        except OSError as cause:
            raise unwritable(self._path, cause) from cause


def table(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of a table for records of samples.jsonl."""
    names = dict.fromkeys(name for one in records for name in one["scores"])
    rows = []
    for one in records:
        turns = (one.get("trajectory") or {}).get("turns", ())
        response = "\n".join(f"{turn['role']}: {turn['text']}" for turn in turns) or one["response"]
        row = {name: one[name] for name in ("prompt", "response", "reward", "advantage", "finished")}
        rows.append(row | {"response": response} | {f"score/{name}": one["scores"].get(name) for name in names})
    return rows


def check(cfg: LoggingConfig) -> list[str]:
    """Check the trackers before a run. Return what was seen. Raises MissingExtraError for one that is not installed,
    TrackerCodeError for a class that is no tracker, ConfigError for arguments that none takes."""
    for name in cfg.args.keys() - {_short(name) for name in cfg.trackers}:
        raise ConfigError(f"logging.args.{name}", cfg.args[name], f"the name of one of {KEY}={cfg.trackers}")
    return [_checked(name, cfg) for name in cfg.trackers]


def _checked(name: str, cfg: LoggingConfig) -> str:
    kind = _kind(name)
    try:
        inspect.signature(kind).bind(**_arguments(name, cfg))
    except TypeError as cause:
        key = f"logging.args.{_short(name)}"
        raise ConfigError(key, _arguments(name, cfg), "arguments of the tracker", f"{cause}.") from None
    for method, count in METHODS.items():
        try:
            inspect.signature(getattr(kind, method)).bind(*[None] * (count + 1))
        except (AttributeError, TypeError):
            expected = f"a class with a method {method} of {count} arguments: see aligner/run/trackers/tracker.py"
            raise TrackerCodeError(f"{KEY}={name!r}: expected {expected}") from None
    return f"{name}, {'into the run folder' if cfg.offline else 'to its server'}"


def _arguments(name: str, cfg: LoggingConfig) -> dict[str, Any]:
    arguments = cfg.args.get(_short(name)) or {}
    if not isinstance(arguments, dict):
        raise ConfigError(f"logging.args.{_short(name)}", arguments, "arguments by name")
    return arguments


def _short(name: str) -> str:
    """Return the name of a tracker in `logging.args`: of a class its own, without the file."""
    return name.rpartition(":")[2]


def _kind(name: str) -> type:
    """Return the class of a tracker."""
    if is_path(name):
        kind = load(name, KEY, "Class", TrackerCodeError)
        if not inspect.isclass(kind):
            raise TrackerCodeError(f"{KEY}={name!r}: expected a class")
        return kind
    package, extra = TRACKERS[name]
    if find_spec(package) is None:
        raise MissingExtraError(package, extra, f"{KEY}={name}")
    return on_demand(f"{KEY}={name}")


def _make(name: str, cfg: LoggingConfig) -> Tracker:
    return _kind(name)(**_arguments(name, cfg))
