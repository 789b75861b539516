"""A folder whose files several ranks write, each its own. An interruption costs only the files being written.

<target>.partial/plan.json         source and options: a restart continues if they are the same
<target>.partial/done/<file>.json  checksum and notes of a finished file
<target>.partial/out/              becomes <target>
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from aligner.errors import AlignerError, CheckpointError, ConfigError, WriteError
from aligner.files import file_hash, fsync_folder, fsync_tree, write_whole
from aligner.foreign import read_record
from aligner.ops.reduce import gathered

PARTIAL = ".partial"
EVERY_S = 10.0  # between lines of progress where there is no terminal


@dataclass(frozen=True)
class FilePlan:
    """A file of the result: `parts` is what `write` puts into it."""

    name: str
    bytes: int
    parts: tuple


# writes the file below the folder; returns its SHA-256 and further notes (JSON)
Write = Callable[[Path, FilePlan, Callable[[int], None]], tuple[str, Any]]


class SharedFolder:
    """A folder that ranks write together. All methods are collective over the world; an error on one rank is raised on
    all."""

    def __init__(self, target: Path, plan: dict[str, Any], fresh: bool):
        """Prepare the files. Raises ConfigError if `target` exists, WriteError if nothing can be written there."""
        self.target, self.partial = target, target.with_name(target.name + PARTIAL)
        self.out, self.done = self.partial / "out", self.partial / "done"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.together(lambda: self._prepare(json.loads(json.dumps(plan)), fresh) if self.rank == 0 else None)

    def _prepare(self, plan: dict[str, Any], fresh: bool) -> None:
        if self.target.exists():
            raise ConfigError(
                "FOLDER", str(self.target), "a folder that does not exist yet", "Remove it, or name another."
            )
        noted = self.partial / "plan.json"
        if fresh or not noted.is_file() or _noted(noted) != plan:
            if noted.is_file() and not fresh:
                print(f"{self.partial} has another source or other options: starting again", file=sys.stderr)
            for folder in (self.out, self.done):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            noted.write_text(json.dumps(plan), encoding="utf-8")

    def together[T](self, work: Callable[[], T]) -> T:
        error: AlignerError | None = None
        try:
            result = work()
        except AlignerError as caught:
            error = caught
        except OSError as caught:
            error = WriteError(f"cannot write {self.partial}: {caught}. Finished files are kept; start again")
        first = next((e for e in gathered(error) if e is not None), None)
        if first is not None:
            raise first
        return result

    def write(self, files: Sequence[FilePlan], write: Write) -> dict[str, tuple[str, Any]]:
        """Make the files that do not exist yet. Returns name -> result of `write` for all files, on rank 0 (else
        empty)."""
        own_files = files[self.rank :: self.world]
        bar = _Progress(sum(f.bytes for f in own_files), self.target.name, self.rank)

        def work() -> None:
            for file in own_files:
                if self._finished(file):
                    bar.add(file.bytes)
                    continue
                digest, notes = write(self.out / file.name, file, bar.add)
                note = json.dumps({"sha256": digest, "notes": notes})
                write_whole(self.done / f"{file.name}.json", note, durable=False)

        self.together(work)
        bar.close()
        if self.rank:
            return {}
        notes = {f.name: read_record(self.done / f"{f.name}.json", CheckpointError) for f in files}
        return {name: (note.text("sha256"), note.list("notes")) for name, note in notes.items()}

    def _finished(self, file: FilePlan) -> bool:
        """Return whether an earlier start has written the file, and it is unchanged."""
        note, path = self.done / f"{file.name}.json", self.out / file.name
        if not note.is_file() or not path.is_file():
            return False
        record = _noted(note)
        return record is not None and isinstance(record.get("notes"), list) and record.get("sha256") == file_hash(path)

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Add the small files by `complete(folder)`, on rank 0, then rename the folder to the target."""

        def work() -> None:
            if self.rank:
                return
            complete(self.out)
            fsync_tree(self.out)
            self.out.rename(self.target)
            fsync_folder(self.target.parent)
            shutil.rmtree(self.partial, ignore_errors=True)

        self.together(work)


def _noted(path: Path) -> dict[str, Any] | None:
    """Read the notes of an earlier start; None if they are damaged, so that the file is written again."""
    try:
        return read_record(path, CheckpointError).fields
    except CheckpointError as error:
        print(f"{error}: writing the file again", file=sys.stderr)
        return None


class _Progress:
    """Progress of rank 0's share, which is about that of every rank."""

    def __init__(self, total: int, title: str, rank: int):
        self.total, self.title, self.rank, self.done = total, title, rank, 0
        self.start_s = self.shown_s = time.monotonic()
        on = rank == 0 and sys.stderr.isatty()
        self.bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, dynamic_ncols=True) if on else None

    def add(self, size: int) -> None:
        self.done += size
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(size)
        elif self.rank == 0 and now - self.shown_s > EVERY_S:
            self.shown_s, left = now, (now - self.start_s) * (self.total / max(1, self.done) - 1)
            text = f"{self.title}: {self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {left:.0f} s left"
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held, mapped files included (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def into_files(pieces: Sequence[tuple[Any, int]], limit: float, name: Callable[[int, int], str]) -> list[FilePlan]:
    """Cut (piece, bytes) in their order into files that stay below `limit`. `name(number, count)`, numbers from 0."""
    groups: list[list[tuple[Any, int]]] = []
    size = 0
    for piece, n in pieces:
        if not groups or size + n > limit:
            groups.append([])
            size = 0
        groups[-1].append((piece, n))
        size += n
    return [
        FilePlan(name(i, len(groups)), sum(n for _, n in group), tuple(piece for piece, _ in group))
        for i, group in enumerate(groups)
    ]
