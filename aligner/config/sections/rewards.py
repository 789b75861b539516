"""The sections `reward` and `eval`: functions and models that score samples, and the meaning of a right answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aligner.config.key import FUNCTION, IGNORE, Section, key
from aligner.config.removed_keys import moved
from aligner.config.rule import rules
from aligner.config.sections.judge import JudgeConfig
from aligner.errors import ConfigError

_FUNCTION = f"{FUNCTION} or a built-in name"
SCORED = ("samples", "evaluation")


@dataclass
class RewardFunctionConfig(Section, key="reward.functions[]"):
    path: str = key("", "Function: module:function, path.py:function, or a built-in name.", valid=(bool, _FUNCTION))
    name: str = key("", "Name in metrics. Empty: the function's.")
    weight: float = key(1.0, "Weight in the sum.")
    args: dict[str, Any] = key({}, "Arguments of the function by name.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = moved(self.path)


@dataclass
class RewardConfig(Section, key="reward"):
    functions: list[RewardFunctionConfig] = key([], "Reward functions, added up.", read_for=SCORED)
    judges: list[JudgeConfig] = key([], "Judges: questions about answers, to the run's engine or a model.")
    model: str = key("", "Folder of a trained reward model (the `hf` folder of an rm run).", resume=IGNORE)
    model_weight: float = key(1.0, "Weight of the reward model in the sum.")
    model_standardize: bool = key(True, "Divide the model's centred score by its std on its own training set.")
    model_attributes: dict[str, float] = key(
        {}, "Map of attributes to their weights in the score, for a model of several. Empty: only the first attribute."
    )
    model_steps: str = key(
        "min", "Aggregation of a process reward model's step probabilities.", choices=("min", "product")
    )
    timeout_s: float = key(
        60.0, "Maximum seconds of all functions per rollout.", above=0, resume=IGNORE, rollouts=False, read_for=SCORED
    )
    max_invalid_fraction: float = key(
        0.02,
        "Fraction of unscored samples in a rollout (a failing sandbox or server) above which the run stops.",
        least=0,
        resume=IGNORE,
        read_for=SCORED,
    )
    workers: int = key(
        4,
        "Reward functions and chunks of samples scored concurrently.",
        least=1,
        resume=IGNORE,
        rollouts=False,
        read_for=SCORED,
    )
    overlap: bool = key(
        True,
        "Score samples while others are generated, with functions that take them one by one.",
        resume=IGNORE,
        rollouts=False,
        read_for=SCORED,
    )
    clip: float = key(0.0, "Largest |reward| after normalisation. 0: no limit.", least=0)
    normalize: bool = key(False, "Subtract the running mean of rewards, and divide by their running std.")

    RULES = rules("!model => model_attributes = | without reward.model")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.model_attributes.items():
            if not math.isfinite(weight):
                raise ConfigError(f"reward.model_attributes.{name}", weight, "a finite number")

    @property
    def any(self) -> bool:
        return bool(self.functions or self.model or self.judges)

    @property
    def judge_names(self) -> list[str]:
        return [judge.name for judge in self.judges]

    @property
    def own_judges(self) -> list[str]:
        """The judges to which the run's own engine replies."""
        return [judge.name for judge in self.judges if judge.own]

    @property
    def judge_models(self) -> list[str]:
        return [judge.name for judge in self.judges if judge.model]

    @property
    def local_judges(self) -> list[str]:
        return [judge.name for judge in self.judges if not judge.endpoint.base_url]

    @property
    def pairwise(self) -> bool:
        return any(judge.kind == "pairwise" for judge in self.judges)


@dataclass
class EvalConfig(Section, key="eval"):
    prompts: int = key(
        512,
        "Maximum held-out rows per evaluation, and rows of each of `tasks`. 0: all.",
        least=0,
        read_for=("training",),
    )
    generate: bool = key(True, "Generate answers and score them by the reward functions, in stages with some.")
    temperature: float = key(0.0, "Sampling temperature of the answers. 0: greedy.", least=0)
    samples: int = key(1, "Answers per row. More than 1 give pass@k.", least=1)
    functions: list[RewardFunctionConfig] = key(
        [],
        "Functions that decide whether an answer is right: all that apply give full score. Empty: reward.functions.",
        like="reward.functions[]",
    )
    full_score: float = key(1.0, "Least score of a function that counts as full.")
    max_response_tokens: int = key(0, "Maximum tokens of an answer. 0: sampling.max_response_tokens.", least=0)

    tasks: list[str] = key(
        [],
        "Tasks and groups of lm-evaluation-harness that evaluate the policy, by the run's engine; with inspect/ before "
        "them tasks of Inspect. Their data must be on this machine (docs/how-to/evaluate.md).",
    )
    tasks_folder: str = key(
        "", "Folder with tasks of your own. Empty: files of Inspect are in the current one.", resume=IGNORE
    )
    tasks_chat: bool = key(False, "Put the tasks' prompts into the chat template. Those of Inspect always are.")

    RULES = rules("""
!tasks => tasks_folder = | without eval.tasks
!tasks => tasks_chat =false | without eval.tasks
samples>1 => temperature >0 | with eval.samples={samples}: greedy answers are equal
""")
