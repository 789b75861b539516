"""Every answer from outside (tools, environments, judges, servers), in the run folder: read first when a rollout is
made again.

<run.dir>/answers/step-00000013-rank-00000.jsonl, appended to: a line is a checksum, a blank, and JSON [key, number of
the question, hash of the question, answer]. The key has the seed of the sample's request, which no other sample of the
run has. A line that does not have its checksum, as one cut off by a kill, is none, which rank 0 says.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from aligner.errors import WriteError
from aligner.files import write_whole

FOLDER = "answers"  # in the run folder
Answer = dict[str, Any]  # with the entry "failed", the cause, where there was none


class AnswerLog:
    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self._step = 0
        self._before: set[str] | None = None  # rollouts that were asked about before this start
        self._known: dict[tuple[str, int, str], Answer] = {}
        self._file: TextIO | None = None
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        """Questions are of this rollout from now on; what any rank had asked in it before this start is known. Raises
        OSError."""
        if step == self._step:
            return
        self.close()
        self._step, self._known = step, {}
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._before is None:
            self._before = self._earlier()
        for path in self._files() if _name(step) in self._before else ():  # not what others are writing
            self._read(path)
        path = self.folder / f"{_name(step)}-rank-{self.rank:05d}.jsonl"
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" if torn else "")

    def _read(self, path: Path) -> None:
        damaged = 0
        for line in _lines(path):
            if (said := _sound(line)) is None:
                damaged += 1
            else:
                key, number, asked, answer = said
                self._known.setdefault((key, number, asked), answer)
        if damaged and self.rank == 0:
            what = f"{damaged} line{'s' * (damaged > 1)} without the right checksum"
            print(f"warning: {path}: {what}: what it answered is asked again", file=sys.stderr, flush=True)

    def of(self, step: int) -> AnswerLog:
        """Another, of this rollout, where several are under way."""
        found = AnswerLog(self.folder, self.rank)
        if self._before is None:
            self._before = self._earlier()
        found._before = self._before
        found.begin(step)
        return found

    def find(self, key: str, number: int, question: Mapping[str, Any]) -> Answer | None:
        return self._known.get((key, number, _digest(json.dumps(question))))

    def write(self, key: str, number: int, question: Mapping[str, Any], answer: Answer) -> None:
        """By any thread."""
        assert self._file is not None, "begin() first"
        text = json.dumps([key, number, _digest(json.dumps(question)), answer])
        try:
            with self._lock:
                self._file.write(f"{_digest(text)} {text}\n")
                self._file.flush()
        except OSError as error:
            raise WriteError(f"{self._file.name}: answers from outside cannot be kept: {error}. Free space") from None

    def forget_failures(self, first: int | None = None) -> None:
        """Of this rollout, which is given up because of them, or from the `first` on, and of later ones, where engines
        are ahead: the next start shall ask again. What they still write is lost."""
        self.close()
        since = _name(self._step if first is None else first)
        if self.rank == 0:
            for path in (one for one in self.folder.glob("step-*.jsonl") if one.name >= since):
                kept = [line for line in _lines(path) if (said := _sound(line)) and "failed" not in said[-1]]
                write_whole(path, "".join(f"{line}\n" for line in kept))
        self._step = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """For a run that does not continue what was logged here."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _earlier(self) -> set[str]:
        return {path.name.partition("-rank")[0] for path in self.folder.glob("step-*.jsonl")}

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{_name(self._step)}-rank-*.jsonl"))


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line]


def _sound(line: str) -> list[Any] | None:
    """What it says: key, number, hash of the question, answer."""
    digest, _, text = line.partition(" ")
    return json.loads(text) if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
