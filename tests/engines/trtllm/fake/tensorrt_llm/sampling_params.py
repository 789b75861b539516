import os
from dataclasses import dataclass, make_dataclass
from enum import Enum
from typing import Any


class LogprobMode(str, Enum):  # noqa: UP042
    RAW = "raw"
    PROCESSED = "processed"


@dataclass(slots=True, kw_only=True)
class _Base:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {self.max_tokens}")


_version = os.environ.get("FAKE_TRTLLM_VERSION", "1.4.0rc1")
_new: list[Any] = []
if not _version.startswith(("1.0.", "1.1.", "1.2.")):
    _new.append(("logprobs_mode", LogprobMode, LogprobMode.RAW))
if _version.startswith("1.4"):
    _new.append(("logprobs_simple_format", bool, False))
SamplingParams = make_dataclass("SamplingParams", _new, bases=(_Base,), kw_only=True)
