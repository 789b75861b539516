"""Building of the TensorRT engine of a config.json, in memory, so that every parameter can be replaced by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.engines.base import listed
from aligner.engines.child.worker import Settings
from aligner.engines.trtllm.layout import EngineParameter
from aligner.errors import EngineError

# attribute of TensorRT-LLM's config -> key of config.json. Its reader follows `transformers`, whose releases have moved
# the rotary keys: a base that is not found becomes a default, and the model is another one
_CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "hidden_act": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
    "dtype": "dtype",
}


def build_runner(settings: Settings, targets: Mapping[str, EngineParameter]) -> tuple[Any, set[str]]:
    """Return a `ModelRunner` with random weights, and the names of the constants that its engine lists with the
    parameters. Raises EngineError, before it builds, where the package reads the model differently."""
    from tensorrt_llm.builder import BuildConfig, KVCacheType, build
    from tensorrt_llm.models import MODEL_MAP
    from tensorrt_llm.runtime import ModelRunner

    raw = json.loads((Path(settings.folder) / "config.json").read_text(encoding="utf-8"))
    architecture = raw["architectures"][0]
    if architecture not in MODEL_MAP:
        raise EngineError(f"this TensorRT-LLM has no {architecture}")
    model_class = MODEL_MAP[architecture]
    config = model_class.config_class.from_hugging_face(settings.folder, dtype=settings.dtype)
    _same_config(config, raw)
    model = model_class.from_config(config)
    constants = _same_parameters(dict(model.named_parameters()), targets)
    engine = build(
        model,
        BuildConfig(
            max_input_len=settings.max_seq_len,
            max_seq_len=settings.max_seq_len,
            max_batch_size=settings.max_batch,
            max_beam_width=1,
            max_num_tokens=settings.max_num_tokens,
            kv_cache_type=KVCacheType.CONTINUOUS,  # its Python runtime calls paging experimental
            strongly_typed=True,
            use_refit=True,
            plugin_config=_plugins(),
            output_timing_cache=str(Path(settings.folder) / "timing.cache"),  # by default in the working directory
        ),
    )
    runner = ModelRunner.from_engine(
        engine=engine,
        max_output_len=None,
        lora_dir=None,
        rank=0,
        debug_mode=False,
        lora_ckpt_source="hf",
        medusa_choices=None,
        stream=None,
        gpu_weights_percent=1,
        enable_context_fmha_fp32_acc=None,
        multi_block_mode=True,
    )
    return runner, constants


def _plugins() -> Any:
    from tensorrt_llm.plugin import PluginConfig

    plugins = PluginConfig()
    plugins.use_fused_mlp = False  # fuses gate and fc into a parameter that no refit of theirs reaches
    plugins.use_paged_context_fmha = False  # needs a paged KV cache
    return plugins


def _same_config(config: Any, raw: Mapping[str, Any]) -> None:
    for name, key in _CONFIG.items():
        actual, wanted = getattr(config, name, None), raw[key]
        if isinstance(wanted, dict) and isinstance(actual, dict):
            actual = {k: actual.get(k) for k in wanted}  # the package may have added keys
        if actual != wanted:
            raise EngineError(f"TensorRT-LLM reads {name}={actual!r} from config.json: expected {key}={wanted!r}")


def _same_parameters(parameters: Mapping[str, Any], targets: Mapping[str, EngineParameter]) -> set[str]:
    """Return the names of constants: rotary tables."""
    constants = {name for name, parameter in parameters.items() if parameter.is_buffer}
    shapes = {name: tuple(p.shape) for name, p in parameters.items() if name not in constants}
    wanted = {name: target.shape for name, target in targets.items()}
    wrong = [
        f"{name}: {shapes.get(name, 'missing')} (expected {wanted.get(name, 'none')})"
        for name in sorted(shapes.keys() | wanted.keys())
        if shapes.get(name) != wanted.get(name)
    ]
    if wrong:
        raise EngineError(f"TensorRT-LLM's model has other parameters: {listed(wrong)}")
    return constants
