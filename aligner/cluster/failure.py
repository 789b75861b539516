"""A failed rank's last words: a small file with time and text, by which the launcher finds the first failure.

Exit times do not show it: the rank that raised may still clean up after a neighbour has noticed the lost connection.
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
    """Write this rank's failure to the launcher's file, if there is a launcher."""
    if VARIABLE not in environ:
        return
    path = Path(environ[VARIABLE])
    try:
        fields = {"time_s": time.time(), "text": text, "exit_code": exit_code}
        path.write_text(json.dumps(fields), encoding="utf-8")
    except OSError:  # a full disk may be the very failure; the text still goes to stderr
        return


def read(path: Path) -> Failure | None:
    """Read a file of `record`; None if there is none, or none that is complete."""
    try:
        fields = read_record(path, AlignerError)
        return Failure(fields.number("time_s"), fields.text("text"), fields.integer("exit_code", low=-(2**31)))
    except AlignerError:
        return None
