"""The log of every answer from outside (tools, environments, judges, servers), in the run folder: read first when a
rollout is made again.

<run.dir>/answers/step-00000013-rank-00000.jsonl, made with the first answer and appended to: a line is a checksum, a
blank, and JSON [key, number of the question, hash of the question, answer]. The key has the seed of the sample's
request, which no other sample of the run has. A line without its checksum, as one cut off by a kill, is ignored,
which rank 0 reports. Files of rollouts that no checkpoint can be resumed before are deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from aligner.errors import WriteError
from aligner.files import write_whole

FOLDER = "answers"  # in the run folder
NAME = re.compile(r"step-(\d{8,18})-rank-(\d{5,})\.jsonl", re.ASCII)
Answer = dict[str, Any]  # with the entry "failed", one of CAUSES, instead of an answer
CAUSES = ("raised", "hung", "died")  # of a failure: by the code, out of time, the process ended


class AnswerLog:
    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self._step = 0
        self._before: set[int] | None = None  # rollouts with answers from before this start
        self._known: dict[tuple[str, int, str], Answer] = {}
        self._file: TextIO | None = None
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        """Begin a rollout: later questions belong to it. The answers to any rank from before this start are loaded."""
        if step == self._step:
            return
        self.close()
        self._step, self._known = step, {}
        if self._before is None:
            self._before = self._earlier()
        for path in self._files(step, step) if step in self._before else ():  # not files that other ranks are writing
            self._read(path)

    def _read(self, path: Path) -> None:
        damaged = 0
        try:
            lines = _lines(path)
        except OSError as error:
            print(f"warning: {path}: {error.strerror}: its answers are asked again", file=sys.stderr, flush=True)
            return
        for line in lines:
            if (entry := _sound(line)) is None:
                damaged += 1
            else:
                key, number, asked, answer = entry
                self._known.setdefault((key, number, asked), answer)
        if damaged and self.rank == 0:
            what = f"{damaged} line{'s' * (damaged > 1)} without the right checksum"
            print(f"warning: {path}: {what}: their questions are asked again", file=sys.stderr, flush=True)

    def of(self, step: int) -> AnswerLog:
        """Return the log of this rollout: another one where several are under way."""
        if step == self._step:
            return self
        log = AnswerLog(self.folder, self.rank)
        if self._before is None:
            self._before = self._earlier()
        log._before = self._before
        log.begin(step)
        return log

    def find(self, key: str, number: int, question: Mapping[str, Any]) -> Answer | None:
        return self._known.get((key, number, _digest(json.dumps(question))))

    def write(self, key: str, number: int, question: Mapping[str, Any], answer: Answer) -> None:
        """Write an answer. Any thread may call this."""
        assert self._step, "begin() first"
        path = self._path()
        text = json.dumps([key, number, _digest(json.dumps(question)), answer])
        try:
            with self._lock:
                if self._file is None:
                    self._file = _appended(path)
                self._file.write(f"{_digest(text)} {text}\n")
                self._file.flush()
        except OSError as error:
            raise WriteError(f"{path}: answers from outside cannot be kept: {error}. Free space") from None

    def forget_failures(self, first: int | None = None) -> None:
        """Forget the failures of this rollout, which ends because of them, or of rollouts from the `first` on, and
        of later ones, where engines are ahead. So the next start asks again. Later answers to this log are lost."""
        self.close()
        for path in self._files(self._step if first is None else first) if self.rank == 0 else ():
            kept = [line for line in _lines(path) if (entry := _sound(line)) and "failed" not in entry[-1]]
            write_whole(path, "".join(f"{line}\n" for line in kept)) if kept else path.unlink(missing_ok=True)
        self._step = 0

    def drop(self, first: int) -> None:
        """Delete files of rollouts before the `first`, which no start needs any more. On rank 0; files that cannot
        be deleted stay."""
        for path in self._files(0, first - 1) if self.rank == 0 else ():
            for name in (path.name, f".{path.name}.tmp"):  # the second one is left by a kill in `forget_failures`
                with suppress(OSError):
                    path.with_name(name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """Delete the log, for a run that does not continue it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self) -> Path:
        return self.folder / f"step-{self._step:08d}-rank-{self.rank:05d}.jsonl"

    def _earlier(self) -> set[int]:
        """Return the rollouts with files from before this start; report other files, on rank 0."""
        steps = {path.name: int(NAME.fullmatch(path.name)[1]) for path in self._files(0)}  # type: ignore[index]
        others = sorted(name for name in _listed(self.folder) - steps.keys() if not name.startswith("."))
        if others and self.rank == 0:
            print(f"{self.folder}: ignored {len(others)} other files, first {others[0]!r:.80}", file=sys.stderr)
        return set(steps.values())

    def _files(self, first: int, last: int | None = None) -> list[Path]:
        """Return the files of the rollouts from the `first` to the `last`, or to the newest."""
        paths = []
        for name in sorted(_listed(self.folder)):
            match, path = NAME.fullmatch(name), self.folder / name
            if match and first <= int(match[1]) <= (int(match[1]) if last is None else last):
                with suppress(OSError):  # gone since
                    paths += [path] if stat.S_ISREG(path.lstat().st_mode) else []
        return paths


def _listed(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _appended(path: Path) -> TextIO:
    """Open a file to append. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    file.write("\n" if torn else "")
    return file


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line]


def _sound(line: str) -> list[Any] | None:
    """Return a line's key, number, hash of the question, and answer; None if its checksum differs."""
    digest, _, text = line.partition(" ")
    return json.loads(text) if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
