"""Trackio. Offline, <run.dir>/trackio is its folder: TRACKIO_DIR=<run.dir>/trackio trackio show."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.run.trackers.tracker import Row, TrackedRun


class Trackio:
    """A run of Trackio. `options` go to `trackio.init`."""

    def __init__(self, **options: Any) -> None:
        self._options = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False, **options}

    def start(self, run: TrackedRun) -> None:
        if run.offline:
            os.environ["TRACKIO_DIR"] = str((run.folder / "trackio").resolve())  # read by the import
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        name = f"{run.name}-{run.id}"  # what it knows runs by
        self._run = trackio.init(run.project, name=name, resume="allow", config=dict(run.config), **self._options)
        self._table = trackio.Table

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        import pandas

        self._run.log({"samples": self._table(dataframe=pandas.DataFrame(rows))}, step=step)

    def finish(self) -> None:
        self._run.finish()
