"""Limits of requests to servers, for `rewards/http` and endpoints of judges."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, Section, key


@dataclass
class LimitsConfig(Section):
    key_env: str = key("", "Environment variable with a key, which is sent as a bearer token and written nowhere.")
    concurrency: int = key(16, "Maximum concurrent requests per rank.", least=1)
    requests_per_minute: float = key(0.0, "Maximum requests per minute and rank. 0: no limit.", least=0)
    tokens_per_minute: float = key(
        0.0, "Maximum tokens per minute and rank: bytes of a request / 4, plus the longest reply. 0: no limit.", least=0
    )
    timeout_s: float = key(20.0, "Maximum seconds per attempt.", above=0)
    retries: int = key(3, "Retries of failures that may be temporary.", least=0)
    deadline_s: float = key(
        50.0,
        "Maximum seconds per rollout with retries, less than reward.timeout_s. Missing replies then count as failed.",
        above=0,
    )


@dataclass
class EndpointConfig(LimitsConfig, key="reward.judges[].endpoint"):
    base_url: str = key("", "URL of an OpenAI API, such as http://host:8000/v1. Empty: an engine of the run replies.")
    model: str = key("", "Name of the model at the endpoint.", resume=REFUSE)
    temperature: float = key(0.0, "Temperature of the endpoint's replies.", least=0, resume=REFUSE)
