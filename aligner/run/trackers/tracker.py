"""What a tracker is: a place outside of metrics.jsonl that shows the metrics and samples of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]  # column -> number, text, true, false or None; all rows of a step have the same columns


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it."""

    id: str  # 12 hex digits, the same at every start of the run
    name: str
    folder: Path
    project: str
    offline: bool  # write below the folder, and use no network
    config: Mapping[str, Any]  # nested
    after: int  # the tracker has the steps up to this one; -1: none


class Tracker(Protocol):
    """A tracker. Only rank 0 makes one. Its arguments are entries of `logging.args`.

    An exception is printed once, and the run goes on without this tracker. Steps come in order. A step may come twice
    in a row, with other metrics. `rewinds = True` in the class says that `start` drops all steps after `run.after`; to
    other trackers a resumed run does not send steps again.
    """

    def start(self, run: TrackedRun) -> None:
        """Begin the run, or continue it if it has an earlier start with this id."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, all of them finite."""

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Take samples of a step, as a table."""

    def finish(self) -> None:
        """Write everything that is kept in memory. A later start may continue the run."""
