from tensorrt_llm.runtime.generation import GenerationSession, SamplingConfig
from tensorrt_llm.runtime.model_runner import ModelRunner

__all__ = ["GenerationSession", "ModelRunner", "SamplingConfig"]
