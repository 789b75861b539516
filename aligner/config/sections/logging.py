"""The section `logging`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import one_of


@dataclass
class WandbConfig:
    mode: str = "disabled"  # disabled, offline, online
    project: str = "aligner"  # of W&B
    entity: str = ""  # a team; empty: the default one

    def __post_init__(self) -> None:
        one_of("logging.wandb.mode", self.mode, ("disabled", "offline", "online"))


@dataclass
class LoggingConfig:
    jsonl: bool = True  # <run.dir>/metrics.jsonl
    tensorboard: bool = True  # <run.dir>/tensorboard
    progress: bool = True  # a bar, or a line per step, on rank 0
    samples_shown: int = 4  # of a rollout, on the terminal and in samples.jsonl
    wandb: WandbConfig = field(default_factory=WandbConfig)
