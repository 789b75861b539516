"""The section `environment`: what a model talks to between the turns of a trajectory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from aligner.config.former import moved
from aligner.config.key import IGNORE, Section, key
from aligner.config.rule import rules
from aligner.errors import ConfigError

CALL_FORMATS = ("hermes", "llama3", "mistral", "qwen3_coder", "glm45", "deepseek", "kimi_k2", "harmony")


@dataclass
class EnvironmentConfig(Section, key="environment"):
    path: str = key("", "Class of the object that a sample plays with: module:Class or path.py:Class. Empty: none.")
    agent: str = key(
        "", "Agent that queries the model itself: module:function, path.py:function or a command line. Empty: none."
    )
    args: dict[str, Any] = key({}, "Arguments of the class, or further ones of the agent's function.")
    tools: list[str] = key([], "Functions that the model may call: module:function or path.py:function.")
    max_turns: int = key(8, "Most answers in a trajectory.", least=1)
    max_tokens: int = key(
        2048,
        "Most tokens of a trajectory behind its prompt: answers, replies of tools, what was rendered anew.",
        least=1,
    )
    max_seconds: float = key(
        0.0, "Most seconds that tools and environment may take in a trajectory. 0: no limit.", least=0
    )
    timeout_s: float = key(
        60.0, "Seconds for one reply of tools or environment.", above=0, resume=IGNORE, rollouts=False
    )
    retries: int = key(
        2,
        "Further tries of a reply that raises, hangs or ends its process, before the sample is invalid.",
        least=0,
        resume=IGNORE,
        rollouts=False,
    )
    workers: int = key(
        2, "Processes of a rank that run tools and environments.", least=1, resume=IGNORE, rollouts=False
    )
    gamma: float = key(1.0, "Discount of a turn: reward = sum of gamma^k x turn_reward after turn k.", least=0, most=1)
    weight: float = key(1.0, "Weight of the environment's reward in the sum, beside reward.functions.")
    calls: str = key(
        "auto",
        "Format in which the model writes calls (docs/reference/environments.md). auto: the chat template's.",
        choices=("auto", *CALL_FORMATS),
    )

    RULES = rules("path or tools => agent = | with path or tools: an agent brings its own")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tools, self.agent = [moved(path) for path in self.tools], moved(self.agent)
        for path in self.tools:
            if self.tools.count(path) > 1:
                raise ConfigError("environment.tools", path, "each function once")

    @property
    def on(self) -> bool:
        return bool(self.path or self.tools or self.agent)

    @property
    def key(self) -> str:
        """That switches this on."""
        return next((f"environment.{name}" for name in ("agent", "path", "tools") if getattr(self, name)), "")

    @property
    def command(self) -> list[str]:
        """The words of an agent's command line; none of a function."""
        return shlex.split(self.agent) if " " in self.agent or ":" not in self.agent else []
