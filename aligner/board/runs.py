"""Run folders as the board knows them: by name, found again at every look, read as they grow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError, DataError
from aligner.foreign import Record

MARKS = ("metrics.jsonl", "config.yaml")  # what makes a folder a run
DEPTH = 4  # of folders within those given: runs/chain/stage, and a sweep of them


class Run:
    """A run folder."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name


class Board:
    """The runs below the folders given."""

    def __init__(self, folders: Sequence[Path]):
        """Raises ConfigError for a folder that is none."""
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError("FOLDER", str(folder), "a run folder, or a folder of runs")
        self.folders = list(folders)
        self._runs: dict[Path, Run] = {}

    def runs(self) -> dict[str, Run]:
        """By name, in natural order of their paths."""
        found = list(dict.fromkeys(run for folder in self.folders for run in within(folder, DEPTH)))
        known = {path: self._runs.get(path) or Run(path, "") for path in found}
        for run, name in zip(known.values(), names(found), strict=True):
            run.name = name
        self._runs = known
        return {run.name: run for run in known.values()}

    def run(self, name: str) -> Run:
        """Raises DataError where there is no such run."""
        found = self.runs()
        if name not in found:
            raise DataError(f"run={name!r}: expected one of the board's {len(found)} runs")
        return found[name]


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def within(folder: Path, depth: int) -> Iterator[Path]:
    """The run folders at most `depth` below; what lies within a run is its own. Links to folders are not followed."""
    if is_run(folder):
        yield folder
        return
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # unreadable, or gone since
        return
    for child in sorted(inside, key=natural) if depth else ():
        yield from within(child, depth - 1)


def natural(path: Path) -> list[tuple[int, str]]:
    """10_x after 9_x."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name) if part]


def names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell the folders apart."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


# --- endpoints


def table(board: Board, asked: Record) -> Any:
    """The runs, a row each."""
    return {"runs": [{"name": run.name, "folder": str(run.folder)} for run in board.runs().values()]}
