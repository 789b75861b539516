"""A rank's last words: a small file with time and text, by which the launcher tells who failed first.

Exit times do not tell it: the rank that raised may finish its clean-up after a neighbour has noticed the lost
connection.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import AlignerError
from aligner.foreign import read_record

VARIABLE = "ALIGNER_FAILURE_FILE"


@dataclass(frozen=True)
class Failure:
    time_s: float
    text: str
    exit_code: int


def record(text: str, exit_code: int, environ: Mapping[str, str] = os.environ) -> None:
    """Write this rank's failure where the launcher looks, if there is a launcher."""
    if VARIABLE not in environ:
        return
    path = Path(environ[VARIABLE])
    try:
        said = {"time_s": time.time(), "text": text, "exit_code": exit_code}
        path.write_text(json.dumps(said), encoding="utf-8")
    except OSError:  # a full disk may be the very failure; the text still goes to stderr
        return


def read(path: Path) -> Failure | None:
    """What `record` wrote, None if there is nothing whole."""
    try:
        said = read_record(path, AlignerError)
        return Failure(said.number("time_s"), said.text("text"), said.integer("exit_code", low=-(2**31)))
    except AlignerError:
        return None
