"""The section `logging`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aligner.config.key import Section, key

# tracker -> its package, and the extra that installs it
TRACKERS = {
    "tensorboard": ("tensorboard", ""),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
    "swanlab": ("swanlab", "swanlab"),
}


@dataclass
class LoggingConfig(Section, key="logging"):
    jsonl: bool = key(True, "Write <run.dir>/metrics.jsonl.")
    trackers: list[str] = key(
        ["tensorboard"],
        "Trackers that get metrics and samples. A class of yours: path.py:Class.",
        choices=tuple(TRACKERS),
        function=True,
    )
    project: str = key("aligner", "Project in the trackers; in MLflow, the experiment.")
    offline: bool = key(True, "Trackers write into the run folder and use no network. false: they report to servers.")
    args: dict[str, Any] = key({}, "Arguments of trackers, by the tracker's name or its class.")
    progress: bool = key(True, "Show a bar, or a line per step, on rank 0.")
    samples_shown: int = key(4, "Number of samples per rollout on the terminal, in samples.jsonl and in trackers.")
