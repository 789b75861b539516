"""TensorBoard's event files, in <run.dir>/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import yaml

from aligner import loading
from aligner.run.trackers.tracker import Row, TrackedRun


class TensorBoard:
    """Events. Of a step that comes again, readers show the last ones."""

    rewinds = True

    def __init__(self) -> None:
        with loading.without("boto3", "botocore"):  # for folders in S3
            from torch.utils.tensorboard import SummaryWriter  # here, because it imports torch

        self._make = SummaryWriter

    def start(self, run: TrackedRun) -> None:
        self._writer = self._make(str(run.folder / "tensorboard"), purge_step=run.after + 1)
        if run.after < 0:
            text = yaml.safe_dump(dict(run.config), sort_keys=False)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(map(_cell, row.values())) for row in rows)]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def finish(self) -> None:
        self._writer.close()


def _cell(value: object) -> str:
    """Return a value for a table in Markdown, which a text cannot leave."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escape(text).replace("|", "&#124;").replace("\r", "").replace("\n", "<br>")
