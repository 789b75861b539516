"""Run folders of the board: by name, listed again for every request, read as they grow."""

from __future__ import annotations

import itertools
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from aligner.board import safe_files
from aligner.board.series import SO_FAR, STEP_S, Series, number
from aligner.cluster import watch
from aligner.cluster.lock import BEAT_S
from aligner.cluster.lock import NAME as LOCK
from aligner.config.freeze import from_yaml
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.foreign import JsonObject, parse_json, record
from aligner.run.alarms import FILE as ALARMS
from aligner.run.metrics import jsonl_records
from aligner.run.starts import FILE as STARTS
from aligner.version import VERSION

MARKS = ("metrics.jsonl", "config.yaml")  # a folder with one of them is a run
DEPTH = 4  # of folders within those given: runs/chain/stage, and a sweep of them
BUDGET = 4 << 20  # bytes of metrics that one request reads: about a sixth of a second
ATTEMPTS = "logs/attempts.tsv"  # of the batch script
LOGS, ENTRIES = 3, 10_000  # logs whose ends are shown, entries of a folder that are looked at
SAID = 500  # characters of an error
FROM = ("model.init", "reward.model", "critic.init", "algorithm.distill.teacher")  # keys that may name another run


class RunFolder:
    """A run folder. `name`: on the board."""

    def __init__(self, folder: Path):
        self.folder, self.name = folder, ""
        self.series = Series(folder / "metrics.jsonl")
        self._files: dict[str, tuple[Any, Any]] = {}
        self._damage: dict[str, str] = {}

    @property
    def damage(self) -> list[str]:
        """Errors of its files, a line each."""
        damage = [text[:SAID] for text in (*self._damage.values(), self.series.damage) if text]
        with suppress(Exception):  # `starts` may have any content
            damage += [text for text in [self._newer()] if text]
        return damage

    def fail(self, error: Exception) -> None:
        """Record an unforeseen error in its files, so that only this run is affected."""
        self._damage["?"] = f"cannot be shown whole: {type(error).__name__}: {' '.join(str(error).split())}"

    @property
    def settings(self) -> dict[str, Any]:
        """Config by dotted key, with all its keys, also those of a newer version."""
        return self._read("config.yaml", read_settings, {})

    @property
    def stage(self) -> str:
        return str(self.settings.get("stage.name") or "")

    @property
    def starts(self) -> list[dict[str, Any]]:
        return self._read(STARTS, _records, [])

    @property
    def alarms(self) -> list[dict[str, Any]]:
        return self._read(ALARMS, _records, [])

    @property
    def summary(self) -> dict[str, Any]:
        return self._read("summary.json", _fields, {})

    @property
    def config(self) -> str:
        with suppress(OSError):
            return safe_files.content(self.folder, "config.yaml", safe_files.CONFIG_BYTES).decode(errors="replace")
        return ""

    def _read(self, name: str, read: Callable[[Path, str], Any], empty: Any) -> Any:
        """Return the content of a file, read again when it has changed; `empty` if it does not exist or cannot be
        read."""
        try:
            status = os.stat(self.folder / name)
        except OSError:
            self._damage.pop(name, None)
            return empty
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if self._files.get(name, (None,))[0] != state:
            self._damage.pop(name, None)
            try:
                self._files[name] = state, read(self.folder, name)
            except Exception as cause:  # any content: YAML alone has dates, numbers and depths that raise other errors
                words = cause.strerror if isinstance(cause, OSError) else str(cause) or type(cause).__name__
                text = " ".join(str(words).removeprefix(f"{self.folder}/").split())
                self._damage[name] = text if text.startswith(name) else f"{name}: {text}"
                self._files[name] = state, empty
        return self._files[name][1]

    def _newer(self) -> str:
        versions = mapping(self.start.get("versions"))
        theirs = str(versions.get("aligner", ""))
        newer = _version(theirs) > _version(VERSION)
        return f"written by aligner {theirs}: this one is {VERSION} and may not know all of it" if newer else ""

    @property
    def start(self) -> dict[str, Any]:
        """Record of the latest start."""
        return next((record for record in reversed(self.starts) if "started" in record), {})

    @property
    def result(self) -> str:
        """End of its last start. If no start was recorded: the last error in a log."""
        if self.starts:
            return str(self.starts[-1].get("result", "no end recorded: running, or killed"))[:SAID]
        lines = [line for text in self.logs.values() for line in text.splitlines() if line.startswith("error")]
        return lines[-1][:SAID] if lines else ""

    @property
    def logs(self) -> dict[str, str]:
        """Ends of its newest logs by name, the newest last."""
        ends = {}
        for name in newest_logs(self.folder):
            with suppress(OSError), safe_files.opened(self.folder, name) as file:
                ends[name] = safe_files.end(file)
        return ends

    def state(self, jobs: dict[str, str]) -> str:
        """Return the state by the queue, its own files, and the lock, which every user of the folder keeps fresh."""
        state = watch.state_of(self.folder, jobs) if self.recorded else "not started"
        if state not in ("ended", "failed", "not started"):
            return state
        with suppress(OSError):
            lock = os.lstat(self.folder / LOCK)
            if stat.S_ISREG(lock.st_mode) and abs(time.time() - lock.st_mtime) < 4 * BEAT_S:
                return "running"
        return "ended" if state == "not started" and (self.starts or self.series.size) else state

    @property
    def recorded(self) -> bool:
        """Whether the batch script's notes can be read."""
        return self._read(ATTEMPTS, safe_files.content, None) is not None or not os.path.lexists(self.folder / ATTEMPTS)

    @property
    def job(self) -> str | None:
        return watch.last_job(self.folder)[0] if self.recorded else None

    def seconds(self) -> float | None:
        """Return the seconds from each start to its end, or to its last record of metrics if no end was recorded; None:
        not known."""
        total, known = 0.0, False
        walls = self.series.points("wall_time")[1]
        walls = walls[~np.isnan(walls)]
        begins = [i for i, record in enumerate(self.starts) if "started" in record]
        for at, upto in zip(begins, [*begins[1:], len(self.starts)], strict=False):
            begun = _epoch(self.starts[at]["started"])
            following = _epoch(self.starts[upto]["started"]) if upto < len(self.starts) else math.inf
            ends = [_epoch(record["ended"]) for record in self.starts[at:upto] if "ended" in record]
            end = ends[0] if ends else max(walls[(begun <= walls) & (walls < following)], default=begun)
            total, known = total + float(end) - begun, True
        if known:
            return number(total)
        return float(walls[-1] - walls[0]) if len(walls) > 1 else None

    def goodput(self, running: bool) -> float | None:
        """Return the seconds of steps that count, as a share of all that were allocated or that it ran; None: not
        known."""
        now = time.time()
        tries = watch.attempts(self.folder, running, now) if self.recorded else []
        whole = watch.allocated_s(tries, now) if tries else self.seconds()
        steps = self.series.newest(SO_FAR + STEP_S)
        return min(1.0, steps / whole) if steps and whole and self.series.share_read == 1 else None


class Board:
    """Runs below the given folders."""

    def __init__(self, folders: Sequence[Path], budget: int = BUDGET):
        """Read these folders. Raises ConfigError for a path that is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError("FOLDER", str(folder), "a run folder, or a folder of runs")
        self.folders, self.budget = list(folders), budget
        self.lock = threading.RLock()  # of the runs' state: requests come from several threads
        self._runs: dict[Path, RunFolder] = {}
        self._jobs: dict[str, str] = {}
        self._asked_s = -math.inf

    def runs(self) -> dict[str, RunFolder]:
        """Return the runs by name, in natural order of their paths."""
        folders = list(dict.fromkeys(run for folder in self.folders for run in within(folder, DEPTH)))
        with self.lock:
            self._runs = {path: self._runs.get(path) or RunFolder(path) for path in folders}
            for run, name in zip(self._runs.values(), names(folders), strict=True):
                run.name = name
            return {run.name: run for run in self._runs.values()}

    def run(self, name: str) -> RunFolder:
        """Return a run. Raises DataError if there is no such run."""
        runs = self.runs()
        if name not in runs:
            raise DataError(f"run={name!r}: expected one of the board's {len(runs)} runs")
        return runs[name]

    def chosen(self, request: JsonObject) -> list[RunFolder]:
        """Return the runs that a page asks for, all without `runs`. Runs that have been removed are left out."""
        known = self.runs()
        return [known[name] for name in request.texts("runs", [*known]) if name in known]

    def look(self, runs: Sequence[RunFolder]) -> None:
        """Read what the runs have written since, as far as the budget allows."""
        left = self.budget
        for run in runs:
            left = max(0, left - run.series.look(left))

    def jobs(self) -> dict[str, str]:
        """Return the state of each job in Slurm's queue, at most some seconds old. No request waits for a dead
        controller."""
        if time.monotonic() - self._asked_s > BEAT_S:
            self._asked_s = time.monotonic()
            threading.Thread(target=self._ask, daemon=True).start()
        return self._jobs

    def _ask(self) -> None:
        self._jobs = watch.queue()


Answer = Callable[[Board, JsonObject], Any]  # JSON values, or an iterator of them, which is streamed line by line


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def within(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run folders at most `depth` below. Folders within a run, links and hidden folders are skipped."""
    try:
        if is_run(folder):
            yield folder
            return
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        inside = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # unreadable, or gone since
        return
    for child in sorted(inside, key=natural) if depth else ():
        yield from within(child, depth - 1)


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which 10_x comes after 9_x."""
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", path.name) if text]


def names(folders: Sequence[Path]) -> list[str]:
    """Return the last components of each path, as many as tell the folders apart."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while len({path_parts[-depth:] for path_parts in parts}) < len(set(parts)):
        depth += 1
    return [os.fsencode("/".join(path_parts[-depth:])).decode("utf-8", "backslashreplace") for path_parts in parts]


def newest_logs(folder: Path) -> list[str]:
    """Return the newest logs of `launch`, of the board, and of the ranks of the newest job; the newest last."""
    times, jobs = {}, {}
    for name, status in _entries(folder, "logs"):
        if stat.S_ISDIR(status.st_mode):
            jobs[name] = status.st_mtime
        elif name.endswith(".log"):
            times[name] = status.st_mtime
    for job in sorted(jobs, key=jobs.__getitem__)[-1:]:
        times |= {name: status.st_mtime for name, status in _entries(folder, job) if name.endswith(".log")}
    return sorted(times, key=times.__getitem__)[-LOGS:]


def _entries(folder: Path, name: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the entries of a folder in a run folder, with names relative to that, without links."""
    if safe_files.within(folder, name):
        with suppress(OSError), os.scandir(folder / name) as entries:
            for entry in itertools.islice(entries, ENTRIES):
                with suppress(OSError):
                    yield f"{name}/{entry.name}", entry.stat(follow_symlinks=False)


def mapping(value: Any) -> dict[str, Any]:
    """Return the mapping, empty for any other value."""
    return value if isinstance(value, dict) else {}


def flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else str(key))]


def read_settings(folder: Path, name: str = "config.yaml") -> dict[str, Any]:
    """Read a config by dotted key. Raises OSError, AlignerError, and errors of PyYAML."""
    return dict(flat(from_yaml(safe_files.content(folder, name, safe_files.CONFIG_BYTES)) or {}))


def _records(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(jsonl_records(safe_files.content(folder, name).splitlines(keepends=True), str(folder / name)))


def _fields(folder: Path, name: str) -> dict[str, Any]:
    where = str(folder / name)
    return record(
        parse_json(safe_files.content(folder, name), where, AlignerError, nan=True), where, AlignerError
    ).fields


def _epoch(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return math.nan


def _version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", text)[:3]]
