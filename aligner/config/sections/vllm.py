"""The section `engine.vllm`, and what of a model and a layout vLLM cannot serve here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from aligner.config.sections.child import ChildConfig

VERSION = "0.32.0"  # that launchers/engine_env.sh installs
# those whose logprobs were compared with transformers' through vLLM
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text")


@dataclass
class VllmConfig(ChildConfig):
    section: ClassVar[str] = "engine.vllm"

    # interpreter of the environment that has vLLM (a path within the checkout, or from the root); "": this one
    python: str = ".venv-vllm/bin/python"
    sleep: bool = False  # give back the KV cache between rollouts; on a GPU only
    cuda_graphs: bool = False  # on a GPU: compile the model and capture decode steps
