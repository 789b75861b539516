"""SwanLab. Offline, <run.dir>/swanlab has a folder for each start: swanlab sync FOLDER --id ID joins them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.run.trackers.tracker import Row, TrackedRun


class SwanLab:
    """A run of SwanLab. `options` go to `swanlab.init`."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def start(self, run: TrackedRun) -> None:
        import swanlab

        self._table = swanlab.echarts.Table
        handler = signal.getsignal(signal.SIGINT)
        self._run = swanlab.init(
            project=run.project,
            id=run.id,
            name=run.name,
            log_dir=str(run.folder / "swanlab"),
            mode="offline" if run.offline else "online",
            resume="allow",
            config=dict(run.config),
            **self._options,
        )
        signal.signal(signal.SIGINT, handler)  # the run's own, which saves

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        table = self._table()
        table.add(list(rows[0]), [list(row.values()) for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self) -> None:
        self._run.finish()
