"""The section `logging`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key, section


@dataclass
class WandbConfig(Section, key="logging.wandb"):
    mode: str = key("disabled", "Mode of logging to Weights & Biases.", choices=("disabled", "offline", "online"))
    project: str = key("aligner", "Project in Weights & Biases.")
    entity: str = key("", "Team in Weights & Biases. Empty: the default one.")


@dataclass
class LoggingConfig(Section, key="logging"):
    jsonl: bool = key(True, "Write <run.dir>/metrics.jsonl.")
    tensorboard: bool = key(True, "Write <run.dir>/tensorboard.")
    progress: bool = key(True, "Show a bar, or a line per step, on rank 0.")
    samples_shown: int = key(4, "Number of samples per rollout on the terminal and in samples.jsonl.")
    wandb: WandbConfig = section(WandbConfig)
