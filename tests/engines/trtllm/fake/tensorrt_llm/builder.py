"""Building: from a model's shapes and random values to an engine in memory."""

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import torch

from tensorrt_llm.calls import note
from tensorrt_llm.llmapi.llm_args import OLD
from tensorrt_llm.plugin import PluginConfig

if not OLD:
    raise ImportError("No module named 'tensorrt_llm.builder'")


class KVCacheType(str, Enum):  # noqa: UP042
    CONTINUOUS = "CONTINUOUS"
    PAGED = "PAGED"
    DISABLED = "DISABLED"


@dataclass(kw_only=True)
class BuildConfig:
    max_input_len: int = 1024
    max_seq_len: int | None = None
    opt_batch_size: int = 8
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    kv_cache_type: KVCacheType | None = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    strongly_typed: bool = True
    use_refit: bool = False
    input_timing_cache: str | None = None
    output_timing_cache: str = "model.cache"
    plugin_config: PluginConfig = field(default_factory=PluginConfig)


class Engine:
    def __init__(self, config, engine):
        self.config, self.engine = config, engine


def build(model, build_config: BuildConfig) -> Engine:
    note("build")
    plugins = build_config.plugin_config
    kind = build_config.kv_cache_type or KVCacheType.PAGED
    if plugins.use_paged_context_fmha and kind is not KVCacheType.PAGED:
        raise RuntimeError("Paged Context FMHA doesn't work with a contiguous KV cache")
    if build_config.output_timing_cache:
        Path(build_config.output_timing_cache).write_bytes(b"cache")
    dtype = getattr(torch, model.config.dtype)
    named = list(model.named_parameters())
    weights = {name: torch.randn(p.shape).to(dtype) for name, p in named if not p.is_buffer}
    constants = [name for name, p in named if p.is_buffer]
    if plugins.use_fused_mlp or os.environ.get("FAKE_TRTLLM_FUSED"):
        for name in [n for n in weights if n.endswith("mlp.fc.weight")]:
            gate = name.replace(".fc.", ".gate.")
            weights[name.replace(".fc.", ".fused_fc.")] = torch.cat([weights.pop(gate), weights.pop(name)])
    refittable = build_config.use_refit and build_config.strongly_typed
    plan = SimpleNamespace(weights=weights, constants=constants, refittable=refittable, refits=0)
    config = SimpleNamespace(pretrained_config=model.config, build_config=build_config)
    return Engine(config, plan)
