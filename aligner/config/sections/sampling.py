"""The section `sampling`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import above, at_least, one_of, within
from aligner.errors import ConfigError


@dataclass
class SamplingConfig:
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    max_response_tokens: int = 64  # the token limit of a response
    stop: list[str] = field(default_factory=list)  # texts that end a response
    # in the texts of answers, which rewards, judges, samples and data made of them have: keep, all but padding, BOS and
    # the stop token at the end; strip, none
    special_tokens: str = "keep"

    def __post_init__(self) -> None:
        at_least("sampling.temperature", self.temperature, 0)
        above("sampling.top_p", self.top_p, 0)
        within("sampling.top_p", self.top_p, 0, 1)
        at_least("sampling.top_k", self.top_k, 0)
        within("sampling.min_p", self.min_p, 0, 1)
        at_least("sampling.max_response_tokens", self.max_response_tokens, 1)
        one_of("sampling.special_tokens", self.special_tokens, ("keep", "strip"))
        if "" in self.stop:
            raise ConfigError(
                "sampling.stop", self.stop, "texts of at least one character: every text has an empty one"
            )
