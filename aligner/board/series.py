"""Incremental reading of metrics.jsonl: each byte is read once, and a metric takes the same memory for any length of
run."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from aligner.board import safe_files
from aligner.errors import AlignerError
from aligner.foreign import parse_json, record

CAPACITY = 4096  # points that a metric keeps
BLOCK = 4 << 20  # bytes read at a time
END = 64 << 10  # bytes of the end of a file, which is looked at before all is read
LONGEST = 64 << 20  # of a line
NOTHING = -1, -1  # the state of a file that cannot be read, or is not there
NAMES = 10_000  # of metrics
ANCHOR = 64  # bytes before the place where reading goes on, by which a file that was written again is known
STEP_S, RATE = "time/step_s", "throughput/tokens_per_s"
TOKENS = "tokens"  # trained on so far
SO_FAR = "so far: "  # with the name of a phase: its seconds up to a step
LARGEST = 1e300  # of a sum: numbers derived from it stay finite

Points = tuple[np.ndarray, np.ndarray]  # steps, values
NONE: Points = np.empty(0, np.int32), np.empty(0)


def number(value: Any) -> float | None:
    """Return the value as a curve can show it, None unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        shown = float(value)
    except OverflowError:  # an integer beyond the largest float
        return None
    return shown if math.isfinite(shown) else None


def thin(points: Points, width: int) -> Points:
    """Return the lowest and the highest of each `width` points, and the rest as it is, so that peaks stay. A gap (NaN)
    is lost if there is a value beside it."""
    steps, values = points
    if width <= 2 or len(steps) < width:
        return points
    whole = len(steps) // width * width
    rows = values[:whole].reshape(-1, width)
    low = np.where(np.isnan(rows), np.inf, rows).argmin(1)
    high = np.where(np.isnan(rows), -np.inf, rows).argmax(1)
    high = np.where(high == low, width - 1, high)  # all are equal, or none is a number
    kept = np.sort(np.stack([low, high], 1), 1) + np.arange(len(rows))[:, None] * width
    kept = np.concatenate([kept.ravel(), np.arange(whole, len(steps))])
    return steps[kept], values[kept]


class Column:
    """A metric. Beyond CAPACITY points the lowest and highest of each `width` records replace them."""

    def __init__(self) -> None:
        self._old = self._new = NONE
        self._width = 2

    def extend(self, points: Points) -> None:
        self._new = joined(self._new, points)
        steps, values = self._new
        if len(steps) < CAPACITY // 2:
            return
        whole = len(steps) // self._width * self._width
        self._old = joined(self._old, thin((steps[:whole], values[:whole]), self._width))
        self._new = steps[whole:], values[whole:]
        while len(self._old[0]) > CAPACITY:
            self._old = thin(self._old, 4)
            self._width *= 2

    def points(self) -> Points:
        return joined(self._old, self._new)


def joined(first: Points, second: Points) -> Points:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def columns_of(records: Sequence[Mapping[str, Any]], sums: dict[str, float]) -> dict[str, Points]:
    """Return the points of each metric of records with a step. Tokens and phases also have their running sums,
    continued from `sums`."""
    rows: defaultdict[str, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))
    for fields in records:
        step = number(fields.get("step"))
        if step is None or abs(step) >= 2**31:
            continue
        for name, value in fields.items():
            steps, values = rows[name]
            steps.append(int(step))
            values.append(value)
    columns = {name: (np.array(steps, np.int32), _numbers(values)) for name, (steps, values) in rows.items()}
    further = {SO_FAR + name: points for name, points in columns.items() if name.startswith("time/")}
    if STEP_S in columns and RATE in columns and len(columns[STEP_S][0]) == len(columns[RATE][0]):
        with np.errstate(over="ignore"):
            further[TOKENS] = columns[RATE][0], columns[RATE][1] * columns[STEP_S][1]
    for name, (steps, values) in further.items():
        totals = (sums.get(name, 0.0) + np.cumsum(np.nan_to_num(values).clip(0, LARGEST))).clip(0, LARGEST)
        sums[name] = float(totals[-1])
        columns[name] = steps, totals
    return columns


def _numbers(values: list[Any]) -> np.ndarray:
    """Return the values as an array, NaN for all that are no finite numbers."""
    if {*map(type, values)} <= {float, int, type(None)}:
        with suppress(OverflowError):  # an integer beyond the largest float
            array = np.array(values, np.float64)
            array[~np.isfinite(array)] = math.nan
            return array
    return np.array([math.nan if (shown := number(value)) is None else shown for value in values])


class Series:
    """Metrics of a run. `damage`: the file's first error, in one line.

    The last record may be written again (MetricsLogger joins to it), so it is read again until another follows."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0  # of the file when it was last looked at
        self._file = (0, 0)
        self._forget()

    def _forget(self) -> None:
        self.damage = ""
        self.ends: list[dict[str, Any]] = []  # the last records of the file
        self._columns: defaultdict[str, Column] = defaultdict(Column)
        self._end: dict[str, Points] = {}  # the last record, if all before it are known
        self._sums: dict[str, float] = {}
        self._offset, self._anchor, self._line, self._bad = 0, b"", 0, ""
        self._state: tuple[int, int] | None = None  # size and time of the file, if it is known to its end
        self._peeked: tuple[int, int] | None = None  # the same of when its end was looked at before

    @property
    def share_read(self) -> float:
        """Share of the file that was read."""
        return 1.0 if self._state else self._offset / max(1, self.size)

    def names(self) -> set[str]:
        known = self._columns.keys() | self._end.keys()
        return {name for name in known - {"step", "wall_time", TOKENS} if not name.startswith(SO_FAR)}

    def points(self, name: str) -> Points:
        old = self._columns[name].points() if name in self._columns else NONE
        return joined(old, self._end.get(name, NONE))

    def newest(self, name: str) -> float | None:
        """Return the last number of a metric."""
        ends = [shown for end in self.ends if (shown := number(end.get(name))) is not None]
        values = self.points(name)[1] if not ends else np.array(ends)
        values = values[~np.isnan(values)]
        return float(values[-1]) if len(values) else None

    def look(self, budget: int) -> int:
        """Read further, about `budget` bytes, and the end; return how many were read. Raises nothing: see `damage`."""
        try:
            with safe_files.opened(self.path.parent, self.path.name) as file:
                return self._look(file, budget)
        except FileNotFoundError:
            self.size = 0
            self._forget()
        except OSError as cause:
            self.damage = f"{self.path.name}: cannot be read: {cause.strerror}"
        except Exception as cause:  # any content
            self.damage = f"{self.path.name}: cannot be read: {type(cause).__name__}: {cause}"
        self._state = NOTHING  # there is no more to read
        return 0

    def _look(self, file: BinaryIO, budget: int) -> int:
        stat = os.fstat(file.fileno())
        self.size, state, identity = stat.st_size, (stat.st_size, stat.st_mtime_ns), (stat.st_dev, stat.st_ino)
        if state == self._state and identity == self._file:
            return 0
        file.seek(self._offset - len(self._anchor))
        if identity != self._file or file.read(len(self._anchor)) != self._anchor:
            self._forget()  # a run that resumed from an earlier step has cut it
            self._file = identity
        self._state, taken, size = None, 0, BLOCK
        while taken < budget and self._state is None:
            file.seek(self._offset)
            data = file.read(size)
            taken += len(data)
            end = data.rfind(b"\n") + 1
            last = data.rfind(b"\n", 0, max(0, end - 1)) + 1  # where the last whole line begins
            self._take(data[:last])
            if len(data) < size:
                self._state = state
                self.ends = self._whole(data[last:end])
                self._end = columns_of(self.ends, dict(self._sums))
            elif not last:
                size *= 2
                if size > LONGEST:
                    self._state = state
                    line = self._line + 1 + (end > 0)  # the last whole one is read again
                    self.damage = f"{self.path.name}:{line}: expected lines of at most {LONGEST} bytes"
        if self._state is None and self._peeked != state:
            self._peeked = state
            file.seek(max(self._offset, self.size - END))
            self.ends = self._whole(file.read(END).partition(b"\n")[2])
            taken += END
        return taken

    def _take(self, data: bytes) -> None:
        """Add whole lines to the points."""
        if not data:
            return
        self._offset, self._anchor, self._end = self._offset + len(data), data[-ANCHOR:], {}
        lines = data.split(b"\n")[:-1]
        for name, points in columns_of(self._records(lines), self._sums).items():
            if name in self._columns or len(self._columns) < NAMES:
                self._columns[name].extend(points)
            else:
                self.damage = self.damage or f"{self.path.name}: expected at most {NAMES} metrics: others are not shown"
        self._line += len(lines)

    def _records(self, lines: list[bytes]) -> list[dict[str, Any]]:
        """Parse lines, without damaged ones."""
        try:
            records = json.loads(b"[" + b",".join(lines) + b"]")
            plain = len(records) == len(lines) and {*map(type, records)} == {dict} and b"\\ud" not in b"".join(lines)
        except (ValueError, RecursionError):
            plain = False
        return records if plain and not self._bad else self._one_by_one(lines)

    def _one_by_one(self, lines: list[bytes]) -> list[dict[str, Any]]:
        records = []
        for i, line in enumerate(lines, self._line + 1):
            if not line.strip(b" \r\t\0"):
                continue
            try:
                records += [_record(line, self.path.name, i)]
                self.damage = self.damage or self._bad
            except AlignerError as error:  # damage if another line follows; else a write was cut off
                self._bad = self._bad or str(error)
        return records

    def _whole(self, data: bytes) -> list[dict[str, Any]]:
        """Return the records at the end of the file."""
        records = []
        for line in data.split(b"\n")[:-1]:
            with suppress(AlignerError):
                records.append(_record(line, self.path.name, 0))
        if records:
            self.damage = self.damage or self._bad
        return records


def _record(line: bytes, name: str, number: int) -> dict[str, Any]:
    return record(parse_json(line, name, AlignerError, line=number, nan=True), f"{name}:{number}", AlignerError).fields
