"""Texts that a model wrote: rows of samples.jsonl, and recorded rollouts with numbers for every token.

An answer contains one page, and a file is read from where the last look at it ended. Texts of a model are data here,
and stay text on the page. Imports no torch.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.board import recorded, safe_files
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
TYPED = {"bash": ("$", "command"), "python": (">>>", "code")}  # the sign before a call of a terminal; its argument
CALL = re.compile(rf"({'|'.join(TYPED)})\((\{{.*\}})\)")
ENDED = re.compile(r"\((exit status|it |the |there |every ).*\)")  # why a call ended (aligner/environments/terminal.py)
CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")  # ECMA-48, xterm's titles
OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\n])")


@dataclass(frozen=True)
class RowOffset:
    """Position of a row in the file."""

    step: int
    reward: float | None
    offset: int
    size: int


@dataclass
class Table:
    """The rows of samples.jsonl that were read so far."""

    path: Path
    _inode: int = 0
    _end: int = 0
    _offsets: list[RowOffset] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def page(self, query: Query, step: int | None = None) -> tuple[list[dict[str, Any]], bool]:
        """Return rows of a step, or of all, and whether more follow."""
        rows = [row for row in self._known() if step in (None, row.step) and query.within(row.reward)]
        if query.order == "newest":
            rows.sort(key=lambda row: -row.step)
        else:
            rows = [row for row in rows if row.reward is not None]
            rows.sort(key=lambda row: row.reward or 0.0, reverse=query.order == "best")
        first = query.page * PAGE
        page = list(itertools.islice(self._rows(rows, query), first, first + PAGE + 1))
        return page[:PAGE], len(page) > PAGE

    def steps(self) -> list[int]:
        return sorted({row.step for row in self._known()})

    def _known(self) -> list[RowOffset]:
        """Return all rows, with those added since; read all again if the file was replaced, as after a resume."""
        with self._lock:
            try:
                opened = safe_files.opened(self.path.parent, self.path.name)
            except OSError:
                return []
            with opened as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._end:
                    self._inode, self._end, self._offsets = stat.st_ino, 0, []
                file.seek(self._end)
                for line in file:
                    if not line.endswith(b"\n"):  # still being written
                        break
                    row = self._row(line)
                    if row is not None and isinstance(row.get("step"), int):
                        self._offsets.append(RowOffset(row["step"], rounded(row.get("reward")), self._end, len(line)))
                    self._end += len(line)
            return list(self._offsets)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """Parse a line; None for a damaged one."""
        try:
            return record(parse_json(line, str(self.path), AlignerError, nan=True), str(self.path), AlignerError).fields
        except AlignerError:
            return None

    def _rows(self, offsets: Sequence[RowOffset], query: Query) -> Iterator[dict[str, Any]]:
        if not offsets:  # and maybe no file
            return
        with safe_files.opened(self.path.parent, self.path.name) as file:
            for row_offset in offsets:
                file.seek(row_offset.offset)
                row = self._row(file.read(row_offset.size))
                if row is not None and query.takes(row.get("prompt", "")):
                    yield _shown(row)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return only the fields that the page knows, with their expected types."""
    trajectory = row.get("trajectory")
    trajectory = trajectory if isinstance(trajectory, dict) else {}
    turns = trajectory.get("turns")
    return {
        "step": row["step"],
        "prompt": plain(str(row.get("prompt", "")), LONGEST),
        "response": plain(str(row.get("response", "")), LONGEST),
        "reward": rounded(row.get("reward")),
        "advantage": rounded(row.get("advantage")),
        "finished": bool(row.get("finished")),
        "scores": _mapping(row.get("scores")),
        "columns": _mapping(row.get("columns")),
        "turns": [_turn(_mapping(turn)) for turn in turns] if isinstance(turns, list) else [],
        "end": " ".join(str(trajectory[name]) for name in ("stop", "failure") if trajectory.get(name)),
    }


def _mapping(value: Any) -> dict[str, Any]:
    return {str(name): plain(inner, LONGEST) for name, inner in value.items()} if isinstance(value, dict) else {}


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with its calls to terminals as they would be typed, or with its output as a screen shows it."""
    text, typed = str(turn.get("text") or ""), list[list[str]]()
    if "tokens" not in turn:
        body, _, last = screen(text).rpartition("\n")
        return turn | ({"text": body, "end": last} if ENDED.fullmatch(last) else {"text": screen(text)})
    lines = text.split("\n")
    while lines and (call := _typed(lines[-1])):
        typed.insert(0, call)
        lines.pop()
    return turn | {"text": "\n".join(lines), "typed": typed}


def _typed(line: str) -> list[str]:
    """Return the sign and the text of a call; nothing for other lines."""
    match = CALL.fullmatch(line)
    try:
        arguments = parse_json(match[2], "a call", AlignerError) if match else None
    except AlignerError:
        return []
    sign, argument = TYPED[match[1]] if match else ("", "")
    text = arguments.get(argument) if isinstance(arguments, dict) else None
    return [sign, text] if isinstance(text, str) else []


def screen(text: str) -> str:
    """Return a program's output as a screen shows it: no codes of colours and moves, of a line that it has overwritten
    the last state."""
    return OVERWRITTEN.sub("", CODES.sub("", text))


@functools.lru_cache(256)
def _table(path: Path) -> Table:
    return Table(path)


# --- endpoints


def samples(board: Board, request: JsonObject) -> Any:
    """Return {"runs": names, "views": [...]}: of the run asked for, else of the first of `runs` that has any, else of
    the first of all; with `report` the newest of all runs."""
    query = Query.read(request)
    with_samples = [run for run in board.runs().values() if _has(run)]
    if request.flag("report", False):
        views = [_reported(run, query, max(1, REPORTED // len(with_samples))) for run in with_samples]
    else:
        first = [*(run for run in board.chosen(request) if run in with_samples), *with_samples][:1]
        name = request.text("run", "") or "".join(run.name for run in first)
        views = [_view(board.run(name), query, request.text("step", ""))] if name else []
    return {"runs": [run.name for run in with_samples], "views": views, "hint": HINT}


def sample_tokens(board: Board, request: JsonObject) -> Any:
    """Return the tokens of one sample of a recorded rollout."""
    folder = board.run(request.text("run")).folder
    return recorded.RecordedRollout.of(folder, request.integer("step")).tokens(request.integer("row"))


def _has(run: RunFolder) -> bool:
    return safe_files.within(run.folder, FILE) or bool(recorded.steps(run.folder))


def _view(run: RunFolder, query: Query, step: str) -> dict[str, Any]:
    """Return one run's page. `step` is a number, TABLE, or empty: the last that was recorded, else TABLE. Raises
    DataError."""
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
    """Return the newest `most` samples, without those that cannot be read."""
    view = _view(run, query, "")
    if "damage" in view:
        print(f"warning: {view['damage']}", file=sys.stderr)
        view |= _view(run, query, TABLE)
    groups = [group | {"samples": group["samples"][:most]} for group in view["groups"][:1]]
    return view | {"rows": view["rows"][:most], "groups": groups}
