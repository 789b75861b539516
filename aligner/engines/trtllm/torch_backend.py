"""TensorRT-LLM's PyTorch backend as a rollout engine: one child process per rank, filled from the live trainer.

  trainer's rank                                child (torch_worker.py; of several ranks also executor.py)
  TrtllmEngine  -- listen, start(config.json) -> LLM(load_format="dummy"), of this rank
     begin_update, buckets, finish_update ----> pre-reload, partial reloads (each answered), finalise, reset prefixes
     generate, logprobs ----------------------> requests with a seed each, by the first rank; context logits

An error between begin_update and finish_update leaves an engine that refuses to generate. Requests of all ranks are
spread over the engines.
"""

from __future__ import annotations

import importlib.util

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.trtllm import TrtllmConfig
from aligner.engines.child.engine import ChildEngine
from aligner.engines.child.process import interpreter
from aligner.engines.native.fleet import Replicated
from aligner.errors import MissingExtraError
from aligner.types import Sums

# ranks that wait for requests do so on the host: some versions would occupy the GPU that the trainer uses meanwhile
ON_RANKS = {"TLLM_DISABLE_MPI": "1", "TLLM_CUDA_OBJECT_COLLECTIVES": "0"}


def require_package(python: str = "", name: str = "trtllm") -> None:
    """Raise MissingExtraError where TensorRT-LLM is not installed, ConfigError where there is no such `python`. Only
    the child can check the packages of another `python`."""
    if python:
        interpreter(python, {}, TrtllmConfig.KEY)
    elif importlib.util.find_spec("tensorrt_llm") is None:
        raise MissingExtraError("tensorrt_llm", name.replace("_", "-"), f"engine.name={name}")


class TrtllmEngine(Replicated, ChildEngine):
    """TensorRT-LLM's PyTorch backend. See `ChildEngine` and `Replicated`."""

    name, title = "trtllm", "TensorRT-LLM"
    worker = "aligner.engines.trtllm.torch_worker:Worker"
    block = 32
    called_on_first = ("listen", "generate")

    @classmethod
    def require(cls, config: EngineConfig) -> None:
        require_package(config.trtllm.python, cls.name)

    def take_sums(self) -> Sums:
        """See `RolloutEngine.take_sums`. TensorRT-LLM fills drafts up to their length, so it is not known how many
        tokens were drafted."""
        sums = super().take_sums()
        if not self.config.draft_tokens:
            return sums
        drafts, accepted = self._call("take_drafts")
        return sums | {"engine/mean_acceptance_length": (float(accepted + drafts), float(drafts))}

    def _variables(self) -> dict[str, str]:
        if self._group is None:
            return {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"}
        return ON_RANKS
