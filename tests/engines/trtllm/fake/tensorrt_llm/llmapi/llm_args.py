import os
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

OLD = os.environ.get("FAKE_TRTLLM_VERSION", "1.4.0rc1").startswith(("1.0.", "1.1.", "1.2."))


if OLD:  # the engine's own memory and its weights have one tag

    class ExecutorMemoryType(str, Enum):  # noqa: UP042
        SAMPLER = "sampler"
        INIT_KV_CACHE = "_no_capture_init_kv_cache"
        EXTRA_RESOURCES = "executor_extra"
        KV_CACHE = "kv_cache"
        MODEL_ENGINE_MAIN = "model"
else:

    class ExecutorMemoryType(str, Enum):  # type: ignore[no-redef]  # noqa: UP042
        SAMPLER = "sampler"
        INIT_KV_CACHE = "_no_capture_init_kv_cache"
        EXTRA_RESOURCES = "executor_extra"
        KV_CACHE = "kv_cache"
        MODEL_ENGINE_MAIN = "model"
        MODEL_WEIGHTS_MAIN = "model_weights"
        MODEL_WEIGHTS_DRAFT = "draft_model_weights"


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    max_gpu_total_bytes: int = 0


@dataclass(kw_only=True)
class CudaGraphConfig:
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


if not OLD:

    @dataclass(kw_only=True)
    class SleepConfig:
        restore_modes: dict[ExecutorMemoryType, str] = field(default_factory=dict)

        def __post_init__(self) -> None:
            wrong = [m for m in self.restore_modes.values() if m not in ("NONE", "CPU", "PINNED", "MEMSET")]
            if wrong:
                raise ValueError(f"restore mode {wrong[0]!r}")


@dataclass(kw_only=True)
class NGramDecodingConfig:
    max_draft_len: int | None = None
    max_matching_ngram_size: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True

    def __post_init__(self) -> None:
        if not self.max_draft_len or self.max_draft_len < 0:
            raise ValueError("max_draft_len must be > 0 for NGram")


@dataclass(kw_only=True)
class TorchLlmArgs:
    model: str
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    cuda_graph_config: CudaGraphConfig | None = None
    allreduce_strategy: str = "AUTO"
    enable_sleep: bool = False
    enable_attention_dp: bool = False
    sleep_config: Any = None
    orchestrator_type: str | None = None
    speculative_config: NGramDecodingConfig | None = None

    def __post_init__(self) -> None:
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format={self.load_format!r}")
        if self.enable_sleep and self.cuda_graph_config is not None:
            raise ValueError("CUDA graphs are not supported with enable_sleep")
        if self.dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r}")

    @property
    def sleeps(self) -> bool:
        return self.enable_sleep or self.sleep_config is not None

    def restore_mode(self, tag: ExecutorMemoryType) -> str:
        modes = self.sleep_config.restore_modes if self.sleep_config else {}
        return modes.get(tag, "NONE" if tag is ExecutorMemoryType.KV_CACHE else "CPU")


TorchLlmArgs.model_fields = {  # type: ignore[attr-defined]
    f.name: f
    for f in fields(TorchLlmArgs)
    if f.name not in (("sleep_config", "orchestrator_type") if OLD else ("enable_sleep",))
}
