"""The section `run`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import at_least
from aligner.errors import ConfigError


@dataclass
class StopConfig:
    """End the stage early once `metric` (an eval metric) reaches `above`."""

    metric: str = ""  # empty: no early end
    above: float = 0.0  # the value that ends the stage


@dataclass
class RunConfig:
    dir: str = "runs/${run.name}"  # everything that the run writes
    name: str = "${stage.name}"  # in run.dir and on boards
    resume: str = "auto"  # auto, never, or a checkpoint folder
    accept_changes: bool = False  # go on from a checkpoint although what defines the run has changed (docs/resume.md)
    deterministic: bool = False  # no wall-clock decisions, deterministic kernels
    steps: int = 100  # optimizer steps for stages without rollouts, rollouts for ppo and grpo
    # > 0: passes over the rows or prompts of the training data that were kept, in place of steps, which follow
    epochs: float = 0.0
    eval_every: int = 0  # 0: only at the end
    samples_every: int = 10  # print the sample table every n steps; 0: never
    stop: StopConfig = field(default_factory=StopConfig)
    export: bool = True  # write a Hugging Face folder at the end

    def __post_init__(self) -> None:
        if not self.dir:
            raise ConfigError("run.dir", self.dir, "a folder for the run")
        at_least("run.steps", self.steps, 0)
        at_least("run.epochs", self.epochs, 0)
        if self.epochs:
            self.steps = 0  # not known before the data
        at_least("run.eval_every", self.eval_every, 0)
        at_least("run.samples_every", self.samples_every, 0)
