"""Run folders as the board knows them: by name, found again at every look, read as they grow."""

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

from aligner.board import own
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

MARKS = ("metrics.jsonl", "config.yaml")  # what makes a folder a run
DEPTH = 4  # of folders within those given: runs/chain/stage, and a sweep of them
BUDGET = 4 << 20  # bytes of metrics that one request reads: about a sixth of a second
ATTEMPTS = "logs/attempts.tsv"  # of the batch script
LOGS, ENTRIES = 3, 10_000  # whose ends are shown, and that are looked at
SAID = 500  # characters of what is wrong
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
        """What is wrong with its files, a line each."""
        found = [text[:SAID] for text in (*self._damage.values(), self.series.damage) if text]
        with suppress(Exception):  # of what `starts` has
            found += [text for text in [self._newer()] if text]
        return found

    def fail(self, error: Exception) -> None:
        """Something in its files was not foreseen: it shall cost this run alone."""
        self._damage["?"] = f"cannot be shown whole: {type(error).__name__}: {' '.join(str(error).split())}"

    @property
    def settings(self) -> dict[str, Any]:
        """The config by dotted key, whatever keys it has: those of a newer version, too."""
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
            return own.content(self.folder, "config.yaml", own.CONFIG_BYTES).decode(errors="replace")
        return ""

    def _read(self, name: str, read: Callable[[Path, str], Any], empty: Any) -> Any:
        """What is read of a file, again when it has changed; `empty` where there is none, or none that can be read."""
        try:
            found = os.stat(self.folder / name)
        except OSError:
            self._damage.pop(name, None)
            return empty
        state = found.st_ino, found.st_size, found.st_mtime_ns
        if self._files.get(name, (None,))[0] != state:
            self._damage.pop(name, None)
            try:
                self._files[name] = state, read(self.folder, name)
            except Exception as cause:  # whatever is in it: YAML alone has dates, numbers and depths that raise others
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
        """What the latest one recorded."""
        return next((record for record in reversed(self.starts) if "started" in record), {})

    @property
    def result(self) -> str:
        """How its last start ended; of starts that came to nothing the error, as far as a log has it."""
        if self.starts:
            return str(self.starts[-1].get("result", "no end recorded: running, or killed"))[:SAID]
        lines = [line for text in self.logs.values() for line in text.splitlines() if line.startswith("error")]
        return lines[-1][:SAID] if lines else ""

    @property
    def logs(self) -> dict[str, str]:
        """The ends of its newest logs by name, the newest last."""
        found = {}
        for name in newest_logs(self.folder):
            with suppress(OSError), own.opened(self.folder, name) as file:
                found[name] = own.end(file)
        return found

    def state(self, jobs: dict[str, str]) -> str:
        """By the queue, its own files, and the lock, which whoever uses the folder keeps fresh."""
        found = watch.state_of(self.folder, jobs) if self.recorded else "not started"
        if found not in ("ended", "not started"):
            return found
        with suppress(OSError):
            lock = os.lstat(self.folder / LOCK)
            if stat.S_ISREG(lock.st_mode) and abs(time.time() - lock.st_mtime) < 4 * BEAT_S:
                return "running"
        return "ended" if self.starts or self.series.size else found

    @property
    def recorded(self) -> bool:
        """Whether what the batch script has noted can be read."""
        return self._read(ATTEMPTS, own.content, None) is not None or not os.path.lexists(self.folder / ATTEMPTS)

    @property
    def job(self) -> str | None:
        return watch.last_job(self.folder) if self.recorded else None

    def seconds(self) -> float | None:
        """From each start to its end, or to its last record of metrics where no end was recorded; None: not known."""
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
        """Seconds of steps that count, of all that were allocated or that it ran; None: not known."""
        now = time.time()
        tries = watch.attempts(self.folder, running, now) if self.recorded else []
        whole = watch.allocated_s(tries, now) if tries else self.seconds()
        steps = self.series.newest(SO_FAR + STEP_S)
        return min(1.0, steps / whole) if steps and whole and self.series.part == 1 else None


class Board:
    """The runs below the folders given."""

    def __init__(self, folders: Sequence[Path], budget: int = BUDGET):
        """Raises ConfigError for a folder that is none."""
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError("FOLDER", str(folder), "a run folder, or a folder of runs")
        self.folders, self.budget = list(folders), budget
        self.lock = threading.RLock()  # of what is known of runs: requests come from several threads
        self._runs: dict[Path, RunFolder] = {}
        self._jobs: dict[str, str] = {}
        self._asked_s = -math.inf

    def runs(self) -> dict[str, RunFolder]:
        """By name, in natural order of their paths."""
        found = list(dict.fromkeys(run for folder in self.folders for run in within(folder, DEPTH)))
        with self.lock:
            self._runs = {path: self._runs.get(path) or RunFolder(path) for path in found}
            for run, name in zip(self._runs.values(), names(found), strict=True):
                run.name = name
            return {run.name: run for run in self._runs.values()}

    def run(self, name: str) -> RunFolder:
        """Raises DataError where there is no such run."""
        found = self.runs()
        if name not in found:
            raise DataError(f"run={name!r}: expected one of the board's {len(found)} runs")
        return found[name]

    def chosen(self, asked: JsonObject) -> list[RunFolder]:
        """The runs that a page asks for, all without `runs`. Those that are gone are left out."""
        known = self.runs()
        return [known[name] for name in asked.texts("runs", [*known]) if name in known]

    def look(self, runs: Sequence[RunFolder]) -> None:
        """Read what they have written since, as far as the budget goes."""
        left = self.budget
        for run in runs:
            left = max(0, left - run.series.look(left))

    def jobs(self) -> dict[str, str]:
        """State of each job in Slurm's queue, at most some seconds old; nobody waits for a dead controller."""
        if time.monotonic() - self._asked_s > BEAT_S:
            self._asked_s = time.monotonic()
            threading.Thread(target=self._ask, daemon=True).start()
        return self._jobs

    def _ask(self) -> None:
        self._jobs = watch.queue()


Answer = Callable[[Board, JsonObject], Any]  # what JSON can say, or an iterator of that, which is streamed line by line


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def within(folder: Path, depth: int) -> Iterator[Path]:
    """The run folders at most `depth` below; what lies within a run is its own. No links, nothing hidden."""
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
    """10_x after 9_x."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name) if part]


def names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell the folders apart."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return [os.fsencode("/".join(part[-depth:])).decode("utf-8", "backslashreplace") for part in parts]


def newest_logs(folder: Path) -> list[str]:
    """Of `launch`, of the board, and of the ranks of the newest job; the newest last."""
    times, jobs = {}, {}
    for name, found in _entries(folder, "logs"):
        if stat.S_ISDIR(found.st_mode):
            jobs[name] = found.st_mtime
        elif name.endswith(".log"):
            times[name] = found.st_mtime
    for job in sorted(jobs, key=jobs.__getitem__)[-1:]:
        times |= {name: found.st_mtime for name, found in _entries(folder, job) if name.endswith(".log")}
    return sorted(times, key=times.__getitem__)[-LOGS:]


def _entries(folder: Path, name: str) -> Iterator[tuple[str, os.stat_result]]:
    """Of a folder in a run folder, by their names in that, links aside."""
    if own.within(folder, name):
        with suppress(OSError), os.scandir(folder / name) as entries:
            for entry in itertools.islice(entries, ENTRIES):
                with suppress(OSError):
                    yield f"{name}/{entry.name}", entry.stat(follow_symlinks=False)


def mapping(value: Any) -> dict[str, Any]:
    """Empty for what is none."""
    return value if isinstance(value, dict) else {}


def flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else str(key))]


def read_settings(folder: Path, name: str = "config.yaml") -> dict[str, Any]:
    """By dotted key. Raises OSError, AlignerError, and whatever PyYAML does."""
    return dict(flat(from_yaml(own.content(folder, name, own.CONFIG_BYTES)) or {}))


def _records(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(jsonl_records(own.content(folder, name).splitlines(keepends=True), str(folder / name)))


def _fields(folder: Path, name: str) -> dict[str, Any]:
    where = str(folder / name)
    return record(parse_json(own.content(folder, name), where, AlignerError, nan=True), where, AlignerError).fields


def _epoch(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return math.nan


def _version(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d{1,9}", text)[:3]]
