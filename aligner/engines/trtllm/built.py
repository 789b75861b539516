"""TensorRT-LLM's TensorRT engines (up to 1.2) as a rollout engine: `torch_backend.TrtllmEngine` with another worker.

trainer's rank                                child (built_worker.py)
TrtllmBuiltEngine  -- start(config.json) ---> from_hugging_face, build, ModelRunner.from_engine: in memory
   begin_update, buckets, finish_update ----> Refitter: names compared, staged by layout, refit_cuda_engine
   generate, logprobs ----------------------> rows decoded together, a seed each; logprobs taken step by step
"""

from __future__ import annotations

from aligner.config.sections.trtllm import NAME, check_window
from aligner.engines.child.buckets import Memory
from aligner.engines.child.worker import Settings
from aligner.engines.trtllm.torch_backend import TrtllmEngine


class TrtllmBuiltEngine(TrtllmEngine):
    """A `RolloutEngine` on TensorRT engines. See `TrtllmEngine`; the build counts in
    `engine.trtllm.start_timeout_s`."""

    name, worker = NAME, "aligner.engines.trtllm.built_worker:EngineWorker"
    block = 1  # its KV cache is not paged

    def _settings(self, memory: Memory) -> Settings:
        check_window(self.cfg, self.max_seq_len)
        return super()._settings(memory)
