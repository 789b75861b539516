"""Limits of requests to servers, as `rewards/http` and endpoints of judges have them."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, Section, key


@dataclass
class LimitsConfig(Section):
    key_env: str = key("", "Environment variable with a key, sent as a bearer token and written nowhere.")
    concurrency: int = key(16, "Requests of a rank at a time.", least=1)
    requests_per_minute: float = key(0.0, "Requests of a rank per minute. 0: no limit.", least=0)
    tokens_per_minute: float = key(
        0.0, "Tokens of a rank per minute: 4 bytes of a request as one, and the longest reply. 0: no limit.", least=0
    )
    timeout_s: float = key(20.0, "Seconds for one try.", above=0)
    retries: int = key(3, "Further tries, where trying may help.", least=0)
    deadline_s: float = key(
        50.0,
        "Seconds for a rollout with all tries, below reward.timeout_s; what is not there then has failed.",
        above=0,
    )


@dataclass
class EndpointConfig(LimitsConfig, key="reward.judges[].endpoint"):
    base_url: str = key("", "URL of OpenAI's API, as http://host:8000/v1. Empty: an engine of the run replies.")
    model: str = key("", "Name of the model there.", resume=REFUSE)
    temperature: float = key(0.0, "Temperature of its replies.", least=0, resume=REFUSE)
