"""The sections `reward` and `eval`: what scores samples, and what counts as right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aligner.config.former import moved
from aligner.config.key import IGNORE, Section, key
from aligner.config.rule import rules
from aligner.config.sections.judge import JudgeConfig
from aligner.errors import ConfigError

_FUNCTION = "module:function, path.py:function or a built-in name"
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
    judges: list[JudgeConfig] = key([], "Questions about answers, to the run's engine or a model.")
    model: str = key("", "Folder of a trained reward model (the `hf` folder of an rm run).", resume=IGNORE)
    model_weight: float = key(1.0, "Weight of the reward model in the sum.")
    model_standardize: bool = key(True, "Divide the model's centred score by its std on its own training set.")
    model_attributes: dict[str, float] = key(
        {}, "Attribute -> its weight in the score, of a model of several. Empty: the first attribute alone."
    )
    model_steps: str = key(
        "min", "How a process reward model's step probabilities become a score.", choices=("min", "product")
    )
    timeout_s: float = key(
        60.0, "Seconds for all functions on one rollout.", above=0, resume=IGNORE, rollouts=False, read_for=SCORED
    )
    max_invalid_fraction: float = key(
        0.02,
        "Fraction of a rollout's samples above which unscored ones (a failing sandbox or server) stop the run.",
        least=0,
        resume=IGNORE,
        read_for=SCORED,
    )
    workers: int = key(
        4,
        "Reward functions and chunks of samples scored at the same time.",
        least=1,
        resume=IGNORE,
        rollouts=False,
        read_for=SCORED,
    )
    overlap: bool = key(
        True,
        "Score samples while others are generated, where a function takes them one by one.",
        resume=IGNORE,
        rollouts=False,
        read_for=SCORED,
    )
    clip: float = key(0.0, "Largest |reward| after normalisation. 0: no limit.", least=0)
    normalize: bool = key(False, "Subtract the running mean, divide by the running std.")

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
        """Those that the run's own engine replies to."""
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
    prompts: int = key(512, "Most held-out rows of an evaluation. 0: all.", least=0, read_for=("training",))
    generate: bool = key(True, "Generate answers and score them by the reward functions, in stages that have any.")
    temperature: float = key(0.0, "Sampling temperature of these answers. 0: greedy.", least=0)
    samples: int = key(1, "Answers to each row; more than 1 give pass@k.", least=1)
    functions: list[RewardFunctionConfig] = key(
        [],
        "What counts as right: an answer that gets full score from every applicable function. Empty: reward.functions.",
        like="reward.functions[]",
    )
    full_score: float = key(1.0, "Score of a function, or more, that counts as full.")
    max_response_tokens: int = key(0, "Most tokens of an answer. 0: sampling.max_response_tokens.", least=0)

    RULES = rules("samples>1 => temperature >0 | with eval.samples={samples}: greedy answers are equal")
