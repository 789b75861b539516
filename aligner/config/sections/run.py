"""The section `run`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import IGNORE, Section, key, section


@dataclass
class StopConfig(Section, key="run.stop"):
    """Keys that end the stage early."""

    metric: str = key("", "Evaluation metric that ends the stage when it reaches `above`. Empty: no early end.")
    above: float = key(0.0, "Value of `metric` that ends the stage.")


@dataclass
class RunConfig(Section, key="run"):
    dir: str = key(
        "runs/${run.name}",
        "Folder for all output of the run.",
        valid=(bool, "a folder for the run"),
        resume=IGNORE,
    )
    name: str = key("${stage.name}", "Name in run.dir and on boards.", resume=IGNORE)
    resume: str = key("auto", "Checkpoint to resume from: auto, never, or a checkpoint folder.", resume=IGNORE)
    accept_changes: bool = key(
        False,
        "Resume from a checkpoint although the definition of the run changed (docs/explanation/resume.md).",
        resume=IGNORE,
    )
    deterministic: bool = key(False, "Use deterministic kernels and make no decision by time.")
    steps: int = key(
        100, "Number of steps: optimizer steps, or rollouts in stages with rollouts.", least=0, rollouts=True
    )
    epochs: float = key(
        0.0,
        "Passes over the training rows or prompts, which determine the steps. 0: use run.steps.",
        least=0,
        read_for=("training",),
    )
    eval_every: int = key(0, "Steps between evaluations. 0: only at the end.", least=0, read_for=("training",))
    samples_every: int = key(10, "Steps between prints of the sample table. 0: never.", least=0)
    stop: StopConfig = section(StopConfig, read_for=("training",))
    export: bool = key(True, "Write a Hugging Face folder at the end.", read_for=("training",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs:
            self.steps = 0  # not known before the data
