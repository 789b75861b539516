"""Retention of a run's checkpoints: the last `checkpoint.keep_last`, the best `keep_best` by `metric`. On rank 0."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.errors import CheckpointError
from aligner.megatron.checkpoint_files import complete_checkpoints, read_state, remove_whole


class Retention:
    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self.config = folder, config
        self._warned_metric = False  # that a checkpoint has no value of `config.metric`
        self._warned: set[Path] = set()  # old checkpoints with a reported problem

    def expect_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once that a checkpoint without the metric cannot be among the best. A save between steps has none."""
        name = self.config.metric
        if not self.config.keep_best or not metrics or metrics.get(name) is not None or self._warned_metric:
            return
        near = ", ".join(difflib.get_close_matches(name, metrics, n=3, cutoff=0.3))
        hint = f" Similar: {near}." if near else ""
        print(f"WARNING: checkpoint.metric={name}: not measured at step {step}, for keep_best.{hint}", flush=True)
        self._warned_metric = True

    def delete_old(self) -> None:
        """Delete the others. No error here ends a run, whose new checkpoint is complete: what cannot be read or
        deleted is reported once."""
        checkpoints = complete_checkpoints(self.folder)
        keep = {path for _, path in checkpoints[-self.config.keep_last :]}
        if self.config.keep_best:
            sign = 1 if self.config.metric.endswith("loss") else -1
            scored = [(sign * m, -step, path) for step, path in checkpoints if (m := self._metric(path)) is not None]
            keep |= {path for _, _, path in sorted(scored)[: self.config.keep_best]}  # of equals the newest
        for _, path in checkpoints:
            if path not in keep:
                try:
                    remove_whole(path)
                except OSError as error:
                    self._warn(path, f"cannot delete the old checkpoint {path}: {error}")

    def _metric(self, path: Path) -> float | None:
        try:
            value = read_state(path)["metric"]
        except (CheckpointError, KeyError, TypeError) as error:
            self._warn(path, f"checkpoint {path} does not count among the best: {error!r}")
            return None
        return value

    def _warn(self, path: Path, text: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            print(f"WARNING: {text}", flush=True)
