"""What sections of engines in child processes share: `engine.trtllm` and `engine.vllm`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key


@dataclass
class ChildConfig(Section):
    python: str = key("", "Python of the environment that has the package; its torch may differ. Empty: this one.")
    start_timeout_s: float = key(
        1800.0, "Seconds for the child to import its package, create the engine and capture CUDA graphs.", above=0
    )
    call_timeout_s: float = key(
        300.0, "Seconds for one bucket of weights, finalising, sleep, wake, or one call for logprobs.", above=0
    )
    generate_timeout_s: float = key(3600.0, "Seconds for one `generate`.", above=0)
    max_seq_len: int = key(
        0, "Most tokens of prompt and response. 0: data.max_prompt_tokens and the longest response.", least=0
    )
    sleep_weights: bool = key(False, "Give back the weights as well, without a copy: each sleep then needs a refit.")
    prefix_reuse: bool = key(True, "Share the KV blocks of a prompt among its samples.")

    @property
    def longest_s(self) -> float:
        """That one call may take."""
        return max(self.start_timeout_s, self.call_timeout_s, self.generate_timeout_s)
