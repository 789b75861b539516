"""What a model wrote: rows of samples.jsonl, and recorded rollouts with numbers for every token.

An answer holds a page, and a file is read from where the last look at it ended. Texts come from a model: they are data
here, and stay text on the page. Imports no torch.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.board import own, recorded
from aligner.board.query import Query, rounded
from aligner.board.runs import Board, RunFolder
from aligner.errors import AlignerError, DataError
from aligner.foreign import JsonObject, parse_json, record
from aligner.run.sample_table import FILE, plain

PAGE = 12  # rows of samples.jsonl
LONGEST = 20_000  # characters of a text
REPORTED = 40  # samples in a report, of all its runs together
HINT = "debug.record=K keeps the rollouts of the last K steps: all samples, with numbers for every token"
TABLE = "table"  # the step of all that samples.jsonl has


@dataclass(frozen=True)
class RowOffset:
    """Of a row in the file."""

    step: int
    reward: float | None
    offset: int
    size: int


@dataclass
class Table:
    """samples.jsonl, as far as it was read."""

    path: Path
    _inode: int = 0
    _end: int = 0
    _places: list[RowOffset] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def page(self, query: Query, step: int | None = None) -> tuple[list[dict[str, Any]], bool]:
        """Rows of a step, or of all, and whether there are more behind them."""
        places = [place for place in self._known() if step in (None, place.step) and query.within(place.reward)]
        if query.order == "newest":
            places.sort(key=lambda place: -place.step)
        else:
            places = [place for place in places if place.reward is not None]
            places.sort(key=lambda place: place.reward or 0.0, reverse=query.order == "best")
        first = query.page * PAGE
        found = list(itertools.islice(self._rows(places, query), first, first + PAGE + 1))
        return found[:PAGE], len(found) > PAGE

    def steps(self) -> list[int]:
        return sorted({place.step for place in self._known()})

    def _known(self) -> list[RowOffset]:
        """With what has been added; all anew where the file is another one, as behind a resume."""
        with self._lock:
            try:
                opened = own.opened(self.path.parent, self.path.name)
            except OSError:
                return []
            with opened as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._end:
                    self._inode, self._end, self._places = found.st_ino, 0, []
                file.seek(self._end)
                for line in file:
                    if not line.endswith(b"\n"):  # still being written
                        break
                    row = self._row(line)
                    if row is not None and isinstance(row.get("step"), int):
                        self._places.append(RowOffset(row["step"], rounded(row.get("reward")), self._end, len(line)))
                    self._end += len(line)
            return list(self._places)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """None for a damaged line."""
        try:
            return record(parse_json(line, str(self.path), AlignerError, nan=True), str(self.path), AlignerError).fields
        except AlignerError:
            return None

    def _rows(self, places: Sequence[RowOffset], query: Query) -> Iterator[dict[str, Any]]:
        if not places:  # and maybe no file
            return
        with own.opened(self.path.parent, self.path.name) as file:
            for place in places:
                file.seek(place.offset)
                row = self._row(file.read(place.size))
                if row is not None and query.takes(row.get("prompt", "")):
                    yield _shown(row)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Only what the page knows, of the kinds that it knows."""
    told = row.get("trajectory")
    told = told if isinstance(told, dict) else {}
    turns = told.get("turns")
    return {
        "step": row["step"],
        "prompt": plain(str(row.get("prompt", "")), LONGEST),
        "response": plain(str(row.get("response", "")), LONGEST),
        "reward": rounded(row.get("reward")),
        "advantage": rounded(row.get("advantage")),
        "finished": bool(row.get("finished")),
        "scores": _mapping(row.get("scores")),
        "columns": _mapping(row.get("columns")),
        "turns": [_mapping(turn) for turn in turns] if isinstance(turns, list) else [],
        "end": " ".join(str(told[name]) for name in ("stop", "failure") if told.get(name)),
    }


def _mapping(value: Any) -> dict[str, Any]:
    return {str(name): plain(inner, LONGEST) for name, inner in value.items()} if isinstance(value, dict) else {}


@functools.lru_cache(256)
def _table(path: Path) -> Table:
    return Table(path)


# --- endpoints


def samples(board: Board, asked: JsonObject) -> Any:
    """{"runs": names, "views": [...]}: of the run asked for, else of the first of `runs` that has any, else of the
    first of all; with `report` the newest of all runs."""
    query = Query.read(asked)
    found = [run for run in board.runs().values() if _has(run)]
    if asked.flag("report", False):
        views = [_reported(run, query, max(1, REPORTED // len(found))) for run in found]
    else:
        first = [*(run for run in board.chosen(asked) if run in found), *found][:1]
        name = asked.text("run", "") or "".join(run.name for run in first)
        views = [_view(board.run(name), query, asked.text("step", ""))] if name else []
    return {"runs": [run.name for run in found], "views": views, "hint": HINT}


def sample_tokens(board: Board, asked: JsonObject) -> Any:
    """Of one sample of a recorded rollout."""
    folder = board.run(asked.text("run")).folder
    return recorded.RecordedRollout.of(folder, asked.integer("step")).tokens(asked.integer("row"))


def _has(run: RunFolder) -> bool:
    return own.within(run.folder, FILE) or bool(recorded.steps(run.folder))


def _view(run: RunFolder, query: Query, step: str) -> dict[str, Any]:
    """`step` is a number, TABLE, or empty: the last that was recorded, else TABLE. Raises DataError."""
    known, table = recorded.steps(run.folder), _table(run.folder / FILE)
    step = step or (str(known[-1]) if known else TABLE)
    if step != TABLE and not (step.isdecimal() and len(step) < 19):
        raise DataError(f"step={step!r:.40}: expected a number, or {TABLE}")
    view = {"run": run.name, "step": step, "recorded": known, "steps": table.steps(), "rows": [], "groups": []}
    try:
        if step != TABLE and int(step) in known:
            view["groups"], view["more"] = recorded.RecordedRollout.of(run.folder, int(step)).page(query)
            return view
    except DataError as error:
        view["damage"] = str(error)
    view["rows"], view["more"] = table.page(query, None if step == TABLE or "damage" in view else int(step))
    return view


def _reported(run: RunFolder, query: Query, most: int) -> dict[str, Any]:
    """The newest `most` samples, without what cannot be read: a report is of what can."""
    view = _view(run, query, "")
    if "damage" in view:
        print(f"warning: {view['damage']}", file=sys.stderr)
        view |= _view(run, query, TABLE)
    groups = [group | {"samples": group["samples"][:most]} for group in view["groups"][:1]]
    return view | {"rows": view["rows"][:most], "groups": groups}
