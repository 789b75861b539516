"""The section `environment`: what a model talks to between the turns of a trajectory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from aligner.config.checks import above, at_least, one_of, within
from aligner.errors import ConfigError

CALL_FORMATS = ("hermes", "llama3", "mistral", "qwen3_coder", "glm45", "deepseek", "kimi_k2", "harmony")


@dataclass
class EnvironmentConfig:
    path: str = ""  # module:Class or path.py:Class, an object of which a sample plays with; empty: none
    agent: str = ""  # module:function or path.py:function that asks the model itself, or a command line; empty: none
    args: dict[str, Any] = field(default_factory=dict)  # of the class, or further ones of the agent's function
    tools: list[str] = field(default_factory=list)  # module:function or path.py:function, that a model may call
    max_turns: int = 8  # answers of a trajectory
    max_tokens: int = 2048  # of a trajectory behind its prompt: answers, what the tools said, what was rendered anew
    max_seconds: float = 0.0  # that tools and environment may take in a trajectory; 0: no limit
    timeout_s: float = 60.0  # of an answer of tools or environment
    retries: int = 2  # of one that raises, hangs or ends its process, before the sample is invalid
    workers: int = 2  # processes of a rank in which tools and environments run
    gamma: float = 1.0  # discount of a turn: reward = sum of gamma^k x what turn_reward gives after turn k
    weight: float = 1.0  # of the environment's reward in the sum, beside reward.functions
    # how the model writes calls (docs/environments.md): hermes (Qwen), llama3, mistral, qwen3_coder, glm45,
    # deepseek, kimi_k2, harmony (gpt-oss); auto: told from the template
    calls: str = "auto"

    def __post_init__(self) -> None:
        for name, low in {"max_turns": 1, "max_tokens": 1, "max_seconds": 0, "retries": 0, "workers": 1}.items():
            at_least(f"environment.{name}", getattr(self, name), low)
        above("environment.timeout_s", self.timeout_s, 0)
        within("environment.gamma", self.gamma, 0, 1)
        one_of("environment.calls", self.calls, ("auto", *CALL_FORMATS))
        for path in self.tools:
            if self.tools.count(path) > 1:
                raise ConfigError("environment.tools", path, "each function once")
        if self.agent and (self.path or self.tools):
            raise ConfigError("environment.agent", self.agent, "empty with path or tools: an agent brings its own")

    @property
    def on(self) -> bool:
        return bool(self.path or self.tools or self.agent)

    @property
    def named(self) -> tuple[str, Any]:
        """The key that switches this on, and its value."""
        names = ("agent", "path", "tools")
        return next((f"environment.{name}", value) for name in names if (value := getattr(self, name)))

    @property
    def command(self) -> list[str]:
        """The words of an agent's command line; none of a function."""
        return shlex.split(self.agent) if " " in self.agent or ":" not in self.agent else []
