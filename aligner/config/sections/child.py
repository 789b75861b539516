"""What sections of engines in child processes share: `engine.trtllm` and `engine.vllm`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import above, at_least


@dataclass
class ChildConfig:
    section = ""  # dotted; no key, so without a type

    python: str = ""  # interpreter of the environment that has the package, whose torch may be another; "": this one
    start_timeout_s: float = 1800.0  # the child imports its package, creates the engine, captures CUDA graphs
    call_timeout_s: float = 300.0  # one bucket of weights, finalising, sleep, wake, one call for logprobs
    generate_timeout_s: float = 3600.0  # one `generate`
    max_seq_len: int = 0  # prompt + response tokens; 0: data.max_prompt_tokens and the longest response
    sleep_weights: bool = False  # give back the weights too, without a copy: each sleep then asks for a refit
    prefix_reuse: bool = True  # the samples of a prompt share its KV blocks

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "call_timeout_s", "generate_timeout_s"):
            above(f"{self.section}.{name}", getattr(self, name), 0)
        at_least(f"{self.section}.max_seq_len", self.max_seq_len, 0)

    @property
    def longest_s(self) -> float:
        """That one call may take."""
        return max(self.start_timeout_s, self.call_timeout_s, self.generate_timeout_s)
