"""vLLM as a rollout engine: one child process per rank, in an environment of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.vllm import SHARES, request_shares
from aligner.engines.base import draft_sums
from aligner.engines.child.buckets import Memory
from aligner.engines.child.engine import ChildEngine
from aligner.engines.child.worker import Settings
from aligner.engines.native.fleet import Replicated
from aligner.engines.vllm.drafter import METHODS, vllm_drafter
from aligner.engines.vllm.pages import Pages
from aligner.errors import ConfigError
from aligner.families.draft_folder import EagleHead, exported
from aligner.types import Sums

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in the child itself
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose prompt logprobs cannot be tempered
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # by one token, which is dropped
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
INVARIANT = "VLLM_BATCH_INVARIANT"  # results of a row do not depend on the rows beside it


def has_linear_kernel() -> bool:
    """Return whether torch has the product in bfloat16 by which vLLM computes linear layers on a CPU."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def check_on_cpu(model: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse, by ConfigError, what vLLM's CPU build has no kernels for."""
    delta = model.linear.key_heads > 0 and model.linear.rule == "delta"
    for hint, lacking in {
        "vLLM's CPU build has no attention to what an indexer chooses.": model.indexer.top_k > 0,
        "vLLM's CPU build has no experts without a gate.": model.traits.ungated and model.moe.num_experts > 0,
        "This CPU has no AVX-512, which the linear layers of vLLM's CPU build need.": delta and not has_linear_kernel(),
    }.items():
        if lacking:
            raise ConfigError("engine.name", "vllm", "native", hint)
    for key, size in {"kv_rank": 512, "rotary_dim": 64}.items() if model.latent.kv_rank else ():
        if getattr(model.latent, key) != size:
            expected = f"{size} with engine.name=vllm on a CPU"
            raise ConfigError(f"model.latent.{key}", getattr(model.latent, key), expected, "engine=native serves it.")
    if delta and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError("engine.dtype", name, "bfloat16 for linear layers of vLLM on a CPU")


class VllmEngine(Replicated, ChildEngine):
    """vLLM. See `ChildEngine` and `Replicated`."""

    name, title = "vllm", "vLLM"
    worker = "aligner.engines.vllm.worker:VllmWorker"
    _drafter: ModelConfig | EagleHead | None = None

    def __init__(self, model: ModelConfig, config: EngineConfig, *, device: torch.device | str, **options: Any):
        on_cpu = torch.device(device).type == "cpu"
        if config.sleeps and on_cpu:
            raise ConfigError("engine.sleep", True, "false on a CPU, where vLLM cannot release memory")
        if (shares := request_shares(config.vllm.args, config.tensor_parallel)) > 1 and on_cpu:
            raise ConfigError(SHARES, shares, "1 on a CPU, where vLLM lacks the collectives of its shares")
        self.block = 64 if model.latent.kv_rank else 32  # which every kernel of such attention reads on a GPU
        if on_cpu and options.get("reports_routing"):
            hint = "vLLM's CPU build runs its first model runner, which names no experts. engine=native does."
            raise ConfigError("mismatch.replay_routing", True, "false with engine.name=vllm on a CPU", hint)
        if on_cpu:
            check_on_cpu(model, options["dtype"])
            self.block = 16 if model.latent.kv_rank else self.block
        if config.draft_model:
            self._drafter = vllm_drafter(config, model)
        super().__init__(model, config, device=device, **options)

    def _settings(self, memory: Memory) -> Settings:
        """Return the settings. vLLM wants room for the longest row of `max_seq_len`: that is shorter where its cache
        is small."""
        pages = self._pages
        fits = (self.config.cache_bytes // pages.bytes - pages.kept) // pages.groups * pages.tokens - 1
        settings, longest = super()._settings(memory), max(fits, 1)
        return replace(
            settings,
            max_seq_len=min(settings.max_seq_len, longest),
            block=self.block,
            prefix_reuse=self._reuses,
            draft_folder=str(exported(self.config.draft_model).resolve()) if self._drafter else "",
            draft_method=METHODS[type(self._drafter)] if self._drafter else "",
        )

    def take_sums(self) -> Sums:
        """See `RolloutEngine.take_sums`."""
        sums = super().take_sums()
        return sums | draft_sums(*self._call("take_drafts")) if self.config.draft_tokens else sums

    @property
    def _reuses(self) -> bool:
        """Whether prefixes are reused: with linear layers vLLM cuts prompts for that, which it cannot on a CPU."""
        linear = bool(self.cfg.linear.key_heads)
        return self.options.prefix_reuse and not (linear and self.device.type == "cpu")

    def _cache_bytes(self, row: int) -> int:
        """Add the token that follows a row that is scored."""
        pages = self._pages
        return (-(-(row + 1) // pages.tokens) * pages.groups + pages.kept) * pages.bytes

    @cached_property
    def _pages(self) -> Pages:
        ranks = self.tensor_parallel // request_shares(self.options.args, self.tensor_parallel)
        states, drafts = 2 if self._reuses else 1, self.config.draft_tokens
        return Pages.of(self.cfg, self.dtype, ranks, self.block, states, self._drafter, drafts)

    def _variables(self) -> dict[str, str]:
        variables = VARIABLES | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        if self.no_routing is not None:  # the other model runner names no experts
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if self.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
            variables[INVARIANT] = os.environ.get(INVARIANT, "1")
        return variables
