"""Weights & Biases. Offline, <run.dir>/wandb has a folder for each start, which `wandb sync` joins to one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.errors import ConfigError
from aligner.run.trackers.tracker import Row, TrackedRun


class Wandb:
    """A run of W&B. `options` go to `wandb.init`."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def start(self, run: TrackedRun) -> None:
        import wandb

        self._table = wandb.Table
        try:
            self._run = wandb.init(
                project=run.project,
                id=run.id,
                name=run.name,
                dir=str(run.folder),
                mode="offline" if run.offline else "online",
                resume=None if run.offline else "allow",
                config=dict(run.config),
                **self._options,
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as cause:
            hint = f"{' '.join(str(cause).split())[:200]} Set WANDB_API_KEY, or logging.offline=true."
            raise ConfigError("logging.trackers", "wandb", "an account on the server", hint) from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows], allow_mixed_types=True)
        self._run.log({"samples": table}, step=step)

    def finish(self) -> None:
        self._run.finish()
