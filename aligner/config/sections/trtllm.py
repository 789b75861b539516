"""The section `engine.trtllm`, and the models that TensorRT-LLM does not serve here. `check_built` is for its engines
built ahead, engine.name=trtllm_engine."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aligner.config.sections.child import ChildConfig
from aligner.config.sections.model.config import unusual
from aligner.errors import ConfigError
from aligner.families import served_by

if TYPE_CHECKING:
    from aligner.config.schema import Config
    from aligner.config.sections.model.config import ModelConfig

NOT_SERVED = {
    "joined": "a family whose files keep each matrix separately with engine.name=trtllm, which receives them so",
    "linear": "a family without linear attention with engine.name=trtllm, where it was not tried",
    "latent": "a family without latent attention with engine.name=trtllm: its treatment of such weights is unknown",
    "global_heads": "a family whose layers have the same heads with engine.name=trtllm, where others were not tried",
    "scaled_queries": "a family whose queries have no factors with engine.name=trtllm, where it was not tried",
}


@dataclass
class TrtllmConfig(ChildConfig, key="engine.trtllm"):
    SET = MappingProxyType(
        dict.fromkeys(["model", "load_format", "skip_tokenizer_init", "max_num_tokens", "allreduce_strategy"], "")
        | {
            "tensor_parallel_size": "engine.tensor_parallel",
            "pipeline_parallel_size": "engine.tensor_parallel",  # all ranks of an engine
            "context_parallel_size": "engine.tensor_parallel",
            "orchestrator_type": "",
            "dtype": "engine.dtype",
            "max_input_len": "engine.trtllm.max_seq_len",
            "max_seq_len": "engine.trtllm.max_seq_len",
            "max_batch_size": "engine.max_batch",
            "kv_cache_config": "engine.kv_cache_bytes or engine.trtllm.prefix_reuse",
            "cuda_graph_config": "engine.cuda_graphs",
            "speculative_config": "engine.draft_tokens",
            "enable_sleep": "engine.sleep",
            "sleep_config": "engine.sleep",
        }
    )


def check_model(cfg: Config, model: ModelConfig) -> None:
    """Check that TensorRT-LLM serves the model here. Raises ConfigError."""
    for trait, expected in NOT_SERVED.items():
        if getattr(model.traits, trait):
            raise ConfigError("model.family", model.family, expected, "engine=native serves it.")


NAME = "trtllm_engine"
SERVED = "engine=trtllm and engine=native serve it."


def check_built(cfg: Config, model: ModelConfig) -> None:
    """Check that this engine serves the model and the run. Raises ConfigError."""
    if NAME not in model.traits.served_by:
        experts = "its layout of experts, one fused tensor for all of them, is not written"
        reason = experts if model.traits.moe else "its class in TensorRT-LLM was not read"
        expected = f"one of {', '.join(served_by(NAME))} with engine.name={NAME}: {reason}"
        raise ConfigError("model.family", model.family, expected, SERVED)
    for key, value, plain in _beyond(model):
        raise ConfigError(f"model.{key}", value, f"{plain} with engine.name={NAME}, where it was not checked", SERVED)
    response = max(cfg.sampling.max_response_tokens, cfg.eval.max_response_tokens)
    longest = cfg.engine.trtllm.max_seq_len or cfg.data.max_prompt_tokens + response
    check_window(model, min(longest, model.max_position))


def _beyond(model: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return (key, value, served value) of features that the engine's classes lack; windows have their own check."""
    entries = [entry for entry in unusual(model) if entry[0] != "attention.window"]
    if model.output_bias:
        entries.append(("qkv_bias", True, False))
    if model.rope_scaling.type != "llama3":
        entries.append(("rope_scaling.type", model.rope_scaling.type, "llama3"))
    return entries


def check_window(model: ModelConfig, max_seq_len: int) -> None:
    """Check that no sliding window matters. Raises ConfigError."""
    window = model.attention.window
    if 0 < window < max_seq_len:
        expected = (
            f"at least {max_seq_len} (the longest prompt and response) or 0 with engine.name={NAME}: its "
            "windows were not checked"
        )
        raise ConfigError("model.attention.window", window, expected)
