"""vLLM as a rollout engine: one child process per replica, in an environment of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.child.buckets import Memory
from aligner.engines.child.engine import ChildEngine
from aligner.engines.child.worker import Settings
from aligner.engines.native.fleet import Replicated
from aligner.errors import ConfigError

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in the child itself
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose prompt logprobs cannot be tempered
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # by one token, which is dropped
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmEngine(Replicated, ChildEngine):
    """vLLM. See `ChildEngine` and `Replicated`."""

    name, title = "vllm", "vLLM"
    worker = "aligner.engines.vllm.worker:VllmWorker"
    block = 32

    def __init__(self, model: ModelConfig, config: EngineConfig, *, device: torch.device | str, **options: Any):
        if config.sleeps and torch.device(device).type == "cpu":
            raise ConfigError("engine.sleep", True, "false on a CPU, where vLLM cannot release memory")
        super().__init__(model, config, device=device, **options)
        self.tensor_parallel = config.tensor_parallel

    def _settings(self, memories: list[Memory]) -> Settings:
        """Return the settings. vLLM wants room for the longest row of `max_seq_len`: that is shorter where its cache
        is small."""
        fits = (self.config.cache_bytes // (self.block * self.position_bytes) - 1) * self.block - 1
        settings = super()._settings(memories)
        return replace(settings, max_seq_len=min(settings.max_seq_len, max(fits, 1)), block=self.block)

    def _cache_bytes(self, row: int) -> int:
        """Add the token that follows a row that is scored, and a block that vLLM keeps for itself."""
        return super()._cache_bytes(row + 1) + self.block * self.position_bytes

    def _variables(self) -> dict[str, str]:
        return VARIABLES | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
