"""Features that only some releases of TensorRT-LLM have, and their use. Data.

Read from its sources; nothing here has been run against a real package. Release candidates of one version differ, so
features are looked for in the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aligner.engines.trtllm.package import Package

NAME = "tensorrt_llm"
ARGS, PARAMS, KV = (
    "tensorrt_llm.llmapi.llm_args:TorchLlmArgs",
    "tensorrt_llm:SamplingParams",
    "tensorrt_llm.llmapi:KvCacheConfig",
)
LOADER = "tensorrt_llm._torch.pyexecutor.model_loader:ModelLoader"
EXECUTOR = "tensorrt_llm._torch.pyexecutor.py_executor:PyExecutor"
TAGS = "tensorrt_llm.llmapi.llm_args:ExecutorMemoryType|tensorrt_llm._torch.virtual_memory:ExecutorMemoryType"
REFIT = "tensorrt_llm.llmapi.rlhf_utils:WorkerExtension.finalize_weight_update"
LOOKUP = "tensorrt_llm.llmapi:NGramDecodingConfig"
_SAMPLERS = "tensorrt_llm._torch.pyexecutor.sampler"
SAMPLER = f"{_SAMPLERS}:TorchSampler|{_SAMPLERS}.sampler:TorchSampler"
_BALANCERS = ("_torch.moe.fused_moe", "_torch.modules.fused_moe")


def _tags(name: str) -> str:
    return "|".join(f"{one}.{name}" for one in TAGS.split("|"))


@dataclass(frozen=True)
class Feature:
    """A feature of some packages. `use`: its purpose; `without`: the behaviour where it is missing."""

    use: str
    without: str
    symbols: tuple[str, ...] = ()
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # symbol -> names it must accept

    def of(self, package: Package) -> bool:
        return not self.lacking(package)

    def lacking(self, package: Package) -> list[str]:
        """Return the symbols and arguments that the package lacks."""
        lacking = [symbol for symbol in self.symbols if not package.has(symbol)]
        for symbol, names in self.arguments.items():
            lacking += [f"{symbol}({name})" for name in names if name not in package.accepts(symbol)]
        return lacking


_MEMORY = tuple(f"tensorrt_llm._torch.virtual_memory:{name}_with_tag" for name in ("release", "materialize"))
FEATURES = {
    "sleep_config": Feature(
        "sleep beside CUDA graphs, of all memory but the weights; only the cache loses its content",
        "enable_sleep",
        (*_MEMORY, "tensorrt_llm.llmapi.llm_args:SleepConfig", _tags("KV_CACHE")),
        {ARGS: ("sleep_config",), "tensorrt_llm.llmapi.llm_args:SleepConfig": ("restore_modes",)},
    ),
    "enable_sleep": Feature(
        "sleep of the KV cache, without CUDA graphs", "sleep_config", _MEMORY, {ARGS: ("enable_sleep",)}
    ),
    "weights_tag": Feature(
        "engine.sleep_weights",
        "it is refused",
        (_tags("MODEL_WEIGHTS_MAIN"),),
        {ARGS: ("sleep_config",)},
    ),
    "ranks": Feature(
        "engine.tensor_parallel",
        "it is refused",
        (
            "tensorrt_llm.executor.worker:GenerationExecutorWorker.setup_engine",
            "tensorrt_llm.executor.worker:GenerationExecutorWorker._get_comm_ranks_device_id",
            "tensorrt_llm._torch.distributed.communicator:TorchDist._get_cluster_info",
            "tensorrt_llm._utils:mpi_disabled",
        ),
        {
            ARGS: ("orchestrator_type",),
            "tensorrt_llm.executor.worker:GenerationExecutorWorker": (
                "engine",
                "hf_model_dir",
                "tokenizer",
                "llm_args",
                "is_llm_executor",
            ),
        },
    ),
    "processed_logprobs": Feature(
        "logprobs at a temperature",
        "a second forward over each row",
        ("tensorrt_llm.sampling_params:LogprobMode.PROCESSED",),
        {PARAMS: ("logprobs_mode",)},
    ),
    "plain_logprobs": Feature(
        "a number for each token", "an object for each token", (), {PARAMS: ("logprobs_simple_format",)}
    ),
    "update_hooks": Feature(
        "models whose loader keeps a state during an update",
        "models have none",
        tuple(f"{LOADER}.{step}_update_weights" for step in ("begin", "finalize", "abort")),
    ),
    "finalize": Feature(
        "finalised weights keep the addresses that CUDA graphs read", "the hooks of each module alone", (REFIT,)
    ),
    "drafts": Feature(
        "engine.draft_tokens, by prompt lookup that the default sampler verifies",
        "it is refused",
        (SAMPLER, LOOKUP, "tensorrt_llm._torch.speculative.ngram:NGramDrafter.prepare_draft_tokens"),
        {ARGS: ("speculative_config",), LOOKUP: ("max_draft_len", "max_matching_ngram_size", "is_public_pool")},
    ),
    "balancer": Feature(
        "experts that are placed by load get their new weights",
        "no model has such",
        tuple(
            "|".join(f"tensorrt_llm.{where}.moe_load_balancer:MoeLoadBalancer.{name}" for where in _BALANCERS)
            for name in ("register_weight_slots_after_to_cuda", "finalize_model")
        ),
    ),
}


def features(package: Package) -> frozenset[str]:
    return frozenset(name for name, feature in FEATURES.items() if feature.of(package))
