"""The section `environment`: tools, environments and agents of trajectories."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from aligner.config.key import IGNORE, Section, key
from aligner.config.removed_keys import moved
from aligner.config.rule import rules
from aligner.errors import ConfigError

CALL_FORMATS = ("hermes", "llama3", "mistral", "qwen3_coder", "glm45", "deepseek", "kimi_k2", "harmony")
CALL_FORMATS += ("gemma4", "lfm2")


@dataclass
class EnvironmentConfig(Section, key="environment"):
    path: str = key("", "Class of the environment: module:Class or path.py:Class. Empty: none.")
    agent: str = key(
        "",
        "Agent that queries the model: module:function, path.py:function or a command line, which runs in the "
        "sandbox of path, if there is one. Empty: none.",
    )
    args: dict[str, Any] = key({}, "Arguments of the class, or additional ones of the agent's function.")
    tools: list[str] = key([], "Functions that the model may call: module:function or path.py:function.")
    max_turns: int = key(8, "Maximum turns in a trajectory.", least=1)
    max_tokens: int = key(
        2048,
        "Maximum tokens of a trajectory after its prompt: responses, tool output and tokens rendered anew.",
        least=1,
    )
    max_seconds: float = key(0.0, "Maximum seconds for tools and environment in a trajectory. 0: no limit.", least=0)
    timeout_s: float = key(
        60.0, "Maximum seconds for one reply of tools or environment.", above=0, resume=IGNORE, rollouts=False
    )
    retries: int = key(
        2,
        "Retries of a call that raises, hangs or ends its process, before the sample becomes invalid.",
        least=0,
        resume=IGNORE,
        rollouts=False,
    )
    workers: int = key(2, "Processes per rank that run tools and environments.", least=1, resume=IGNORE, rollouts=False)
    reward: str = key(
        "",
        "Function of TRL's convention that scores environments, f(environments, **kwargs): module:function or "
        "path.py:function. Empty: get_reward of the class.",
    )
    gamma: float = key(1.0, "Discount of a turn: reward = sum of gamma^k x turn_reward after turn k.", least=0, most=1)
    weight: float = key(1.0, "Weight of the environment's reward in the sum with reward.functions.")
    calls: str = key(
        "auto",
        "Format of the model's tool calls (docs/reference/environments.md). auto: detect by the template.",
        choices=("auto", *CALL_FORMATS),
    )

    RULES = rules("""
tools => agent = | with tools: an agent brings its own
path agent !command => agent | a command line with path: it runs in the environment's sandbox, a function does not
agent => reward = | with agent: it has a reward of its own, or path's
!path => reward = | without environment.path: there is no environment to score
""")

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
        """The key that enables this, "" if none is set."""
        return next((f"environment.{name}" for name in ("agent", "path", "tools") if getattr(self, name)), "")

    @property
    def command(self) -> list[str]:
        """The words of an agent's command line; [] for a function."""
        return shlex.split(self.agent) if " " in self.agent or ":" not in self.agent else []
