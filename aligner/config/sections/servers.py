"""How servers that score or judge are asked: of reward `http` its `args`, of a judge its `endpoint`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import above, at_least


@dataclass
class LimitsConfig:
    key_env: str = ""  # variable of the environment with a key, sent as a bearer token and written nowhere
    concurrency: int = 16  # requests of a rank at a time
    requests_per_minute: float = 0.0  # of a rank; 0: no limit
    # of a rank, 4 bytes of a request counting as one, and all that a reply may have; 0: no limit
    tokens_per_minute: float = 0.0
    timeout_s: float = 20.0  # of one try
    retries: int = 3  # further tries, where trying may help
    deadline_s: float = 50.0  # of a rollout with all tries, below reward.timeout_s; what is not there then has failed

    def check(self, prefix: str = "") -> None:
        """Raises ConfigError."""
        at_least(f"{prefix}concurrency", self.concurrency, 1)
        for name in ("requests_per_minute", "tokens_per_minute", "retries"):
            at_least(f"{prefix}{name}", getattr(self, name), 0)
        above(f"{prefix}timeout_s", self.timeout_s, 0)
        above(f"{prefix}deadline_s", self.deadline_s, 0)


@dataclass
class EndpointConfig(LimitsConfig):
    base_url: str = ""  # of OpenAI's API, as http://host:8000/v1; empty: an engine of the run replies
    model: str = ""  # its name there
    temperature: float = 0.0  # of its replies
