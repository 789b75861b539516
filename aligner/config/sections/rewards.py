"""The sections `reward` and `eval`: what scores samples, and what counts as right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from aligner.config.checks import above, at_least, one_of
from aligner.config.sections.judge import JudgeConfig
from aligner.errors import ConfigError


@dataclass
class RewardFunctionConfig:
    path: str = ""  # module:function, path.py:function, or a built-in name
    name: str = ""  # in metrics; empty: the function's
    weight: float = 1.0  # in the sum
    args: dict[str, Any] = field(default_factory=dict)  # of the function, by name

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "reward.functions[].path", self.path, "module:function, path.py:function or a built-in name"
            )


@dataclass
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)  # empty: reward.model alone
    judges: list[JudgeConfig] = field(default_factory=list)  # questions about answers, to the run's engine or a model
    model: str = ""  # folder of a trained reward model (the `hf` folder of an rm run)
    model_weight: float = 1.0  # in the sum
    model_standardize: bool = True  # divide the model's centred score by its std on its own training set
    # of a model of several attributes: attribute -> its weight in the score; empty: the first attribute alone
    model_attributes: dict[str, float] = field(default_factory=dict)
    model_steps: str = "min"  # of a process reward model: min, product of the probabilities of an answer's steps
    timeout_s: float = 60.0  # of all functions for one rollout
    # of a rollout's samples: where more could not be scored, by a sandbox or a server that fails, the run stops
    max_invalid_fraction: float = 0.02
    workers: int = 4  # reward functions and chunks of samples scored at the same time
    overlap: bool = True  # score samples while others are generated, where a function takes them one by one
    clip: float = 0.0  # |reward| limit after normalisation; 0: off
    normalize: bool = False  # subtract the running mean, divide by the running std

    def __post_init__(self) -> None:
        for name, weight in self.model_attributes.items():
            if not math.isfinite(weight):
                raise ConfigError(f"reward.model_attributes.{name}", weight, "a finite number")
        if self.model_attributes and not self.model:
            raise ConfigError("reward.model_attributes", self.model_attributes, "empty without reward.model")
        one_of("reward.model_steps", self.model_steps, ("min", "product"))
        above("reward.timeout_s", self.timeout_s, 0)
        at_least("reward.max_invalid_fraction", self.max_invalid_fraction, 0)
        at_least("reward.workers", self.workers, 1)
        at_least("reward.clip", self.clip, 0)


@dataclass
class EvalConfig:
    prompts: int = 512  # at most this many held-out rows; 0: all
    generate: bool = True  # greedy answers scored by the reward functions (stages that have any)
    temperature: float = 0.0  # 0: greedy
    samples: int = 1  # > 1: pass@k
    # what counts as right; empty: reward.functions. An answer is right if every applicable function gives it full score
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    full_score: float = 1.0  # of a function, or more
    max_response_tokens: int = 0  # 0: sampling.max_response_tokens

    def __post_init__(self) -> None:
        at_least("eval.prompts", self.prompts, 0)
        at_least("eval.temperature", self.temperature, 0)
        at_least("eval.samples", self.samples, 1)
        at_least("eval.max_response_tokens", self.max_response_tokens, 0)
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                "eval.temperature", 0, f"a number > 0 with eval.samples={self.samples}: greedy answers are equal"
            )
