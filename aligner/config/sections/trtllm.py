"""The section `engine.trtllm`: what the TensorRT-LLM engine needs beyond the other keys of `engine`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.sections.child import ChildConfig

ONE_RANK = (
    "1 with engine.name=trtllm, one engine per rank: replacing the weights of a TensorRT-LLM engine of several ranks "
    "is not implemented here; engine=vllm and engine=native do it"
)


@dataclass
class TrtllmConfig(ChildConfig):
    section = "engine.trtllm"
