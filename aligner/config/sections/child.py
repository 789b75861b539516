"""Keys shared by the sections of engines in child processes: `engine.trtllm` and `engine.vllm`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aligner.config.key import Section, key
from aligner.errors import ConfigError

_STORES = ("kv_transfer_config", "kv_offloading_backend", "kv_connector_config")
_BALANCERS = ("enable_eplb", "eplb_config", "enable_elastic_ep")
# options that updates of the weights exclude -> why
_REFUSED = dict.fromkeys(_STORES, "there keys and values of old weights would outlast an update")
_REFUSED |= dict.fromkeys(_BALANCERS, "an update would write experts to where they were at the start")


@dataclass
class ChildConfig(Section):
    python: str = key("", "Python of an environment with the engine's package. Its torch may differ. Empty: this one.")
    start_timeout_s: float = key(
        1800.0, "Maximum seconds for a child to import its package, create the engine and capture CUDA graphs.", above=0
    )
    call_timeout_s: float = key(
        300.0, "Maximum seconds per call: a bucket of weights, finalising, sleep, wake or logprobs.", above=0
    )
    generate_timeout_s: float = key(3600.0, "Maximum seconds for one `generate`.", above=0)
    max_seq_len: int = key(
        0, "Maximum tokens of prompt and response. 0: data.max_prompt_tokens plus the longest response.", least=0
    )
    prefix_reuse: bool = key(True, "Share a prompt's KV blocks among its samples.")

    args: dict[str, Any] = key(
        {},
        "Additional options of the package, by its own names: vLLM's EngineArgs, TensorRT-LLM's LlmArgs. Options that "
        "this project sets, or that updates of the weights exclude, are refused.",
    )
    # without an annotation, which would make it a key
    SET = MappingProxyType[str, str]({})  # options that the worker sets -> the key that they follow

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.args.items():
            if name in self.SET:
                hint = f"Set {self.SET[name]}." if self.SET[name] else "Remove it."
                raise ConfigError(f"{self.KEY}.args.{name}", value, "an option that this project does not set", hint)
            if name in _REFUSED:
                raise ConfigError(f"{self.KEY}.args.{name}", value, f"no such option: {_REFUSED[name]}", "Remove it.")

    @property
    def longest_s(self) -> float:
        """The longest that one call may take."""
        return max(self.start_timeout_s, self.call_timeout_s, self.generate_timeout_s)
