"""The section `engine.trtllm`: what the TensorRT-LLM engine needs beyond the other keys of `engine`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.sections.child import ChildConfig

# why, and what would lift it
ONE_RANK = (
    "1 with engine.name=trtllm, one engine per rank: under MPI TensorRT-LLM has no way to replace the weights of an "
    "engine of several ranks; its own way for that is Ray (orchestrator_type=ray and WorkerExtension.update_weights), "
    "which this job does not start"
)


@dataclass
class TrtllmConfig(ChildConfig):
    section = "engine.trtllm"
