"""The section `run`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import IGNORE, Section, key, section


@dataclass
class StopConfig(Section, key="run.stop"):
    """End the stage early."""

    metric: str = key("", "Evaluation metric that ends the stage once it reaches `above`. Empty: no early end.")
    above: float = key(0.0, "Value of `metric` that ends the stage.")


@dataclass
class RunConfig(Section, key="run"):
    dir: str = key(
        "runs/${run.name}",
        "Folder for everything that the run writes.",
        valid=(bool, "a folder for the run"),
        resume=IGNORE,
    )
    name: str = key("${stage.name}", "Name in run.dir and on boards.", resume=IGNORE)
    resume: str = key("auto", "Where to go on: auto, never, or a checkpoint folder.", resume=IGNORE)
    accept_changes: bool = key(
        False, "Go on from a checkpoint although what defines the run has changed (docs/resume.md).", resume=IGNORE
    )
    deterministic: bool = key(False, "Decide nothing by the clock and use deterministic kernels.")
    steps: int = key(
        100, "Optimizer steps of stages without rollouts; rollouts of ppo and grpo.", least=0, rollouts=True
    )
    epochs: float = key(
        0.0,
        "Passes over the training rows or prompts, from which the steps follow. 0: run.steps counts.",
        least=0,
        read_for=("training",),
    )
    eval_every: int = key(0, "Steps between two evaluations. 0: only at the end.", least=0, read_for=("training",))
    samples_every: int = key(10, "Steps between two prints of the sample table. 0: never.", least=0)
    stop: StopConfig = section(StopConfig, read_for=("training",))
    export: bool = key(True, "Write a Hugging Face folder at the end.", read_for=("training",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs:
            self.steps = 0  # not known before the data
