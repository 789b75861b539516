"""MLflow. Offline, <run.dir>/mlflow is a file store, for `mlflow server` and `mlflow migrate-filestore`."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aligner.errors import ConfigError
from aligner.run.trackers.tracker import Row, TrackedRun

TAG = "aligner.id"  # MLflow chooses the ids of runs itself
MANY, LONG = 100, 6000  # the most parameters of a request, and their length


class Mlflow:
    """A run of MLflow. `tags` are its tags, and `uri` the address of a server instead of MLFLOW_TRACKING_URI."""

    def __init__(self, uri: str = "", tags: Mapping[str, str] | None = None) -> None:
        self._uri, self._tags = uri or os.environ.get("MLFLOW_TRACKING_URI", ""), dict(tags or {})

    def start(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the default of 7 stops training for minutes
        if run.offline:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        elif not self._uri:
            hint = "Set MLFLOW_TRACKING_URI, or logging.offline=true."
            raise ConfigError("logging.trackers", "mlflow", "the address of a server with logging.offline=false", hint)
        self._client = MlflowClient((run.folder / "mlflow").resolve().as_uri() if run.offline else self._uri)
        experiment = self._client.get_experiment_by_name(run.project)
        home = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        runs = self._client.search_runs([home], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(home, tags={**self._tags, TAG: run.id}, run_name=run.name).info.run_id
        params = [Param(_name(key), str(value)[:LONG]) for key, value in _leaves(run.config)]
        for i in range(0, len(params), MANY):
            self._client.log_batch(self._id, params=params[i : i + MANY])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [self._metric(_name(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Write a file for each step. `log_table` would read all earlier samples, or write a tag that is too long."""
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_text(self._id, json.dumps(table), f"samples/{step:08}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def _name(text: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", text)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
