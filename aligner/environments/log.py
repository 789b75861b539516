"""Every answer of tools and environments, in the run folder: read first when a rollout is made again.

<run.dir>/environment/step-00000013-rank-00000.jsonl, appended to: a line is a checksum, a blank, and JSON [key, number
of the question, hash of the question, answer]. The key is the seed of the sample's request, which no other sample of
the run has. A line cut off by a kill is none.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from aligner.errors import WriteError

FOLDER = "environment"  # in the run folder
NAME = re.compile(r"step-(\d{8})-rank-\d{5}\.jsonl")
Answer = dict[str, Any]


class AnswerLog:
    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self._step = 0
        self._known: dict[tuple[str, int], tuple[str, Answer]] = {}
        self._file: TextIO | None = None

    def begin(self, step: int) -> None:
        """Questions are of this rollout from now on; what any rank has asked in it before is known. Raises OSError."""
        if step == self._step:
            return
        self.close()
        self._step, self._known = step, {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob(f"step-{step:08d}-rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                digest, _, text = line.partition(" ")
                if digest == _digest(text):
                    key, number, asked, answer = json.loads(text)
                    self._known.setdefault((key, number), (asked, answer))
        path = self.folder / f"step-{step:08d}-rank-{self.rank:05d}.jsonl"
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" if torn else "")

    def find(self, key: str, number: int, question: Mapping[str, Any]) -> Answer | None:
        asked, answer = self._known.get((key, number), ("", None))
        return answer if asked == _digest(json.dumps(question)) else None

    def write(self, key: str, number: int, question: Mapping[str, Any], answer: Answer) -> None:
        assert self._file is not None, "begin() first"
        text = json.dumps([key, number, _digest(json.dumps(question)), answer])
        try:
            self._file.write(f"{_digest(text)} {text}\n")
            self._file.flush()
        except OSError as error:
            raise WriteError(f"{self._file.name}: the answers of tools cannot be kept: {error}. Free space") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """For a run that does not continue what was logged here."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
