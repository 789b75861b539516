"""The section `engine.vllm`, and the models and layouts that vLLM does not serve here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aligner.config.key import key
from aligner.config.rule import value_of
from aligner.config.sections.child import ChildConfig
from aligner.errors import ConfigError
from aligner.families import served_by

if TYPE_CHECKING:
    from aligner.config.schema import Config
    from aligner.config.sections.model.config import ModelConfig

VERSION = "0.32.0"  # installed by launchers/engine_env.sh
DATA_PARALLEL = "data_parallel_size"  # of vLLM: so many shares of a replica's ranks have requests of their own
SHARES = f"engine.vllm.args.{DATA_PARALLEL}"

_SET = ("model", "load_format", "skip_tokenizer_init", "generation_config", "seed", "logprobs_mode")
_SET += ("distributed_executor_backend", "pipeline_parallel_size", "worker_extension_cls")
_SET += ("max_num_batched_tokens", "gpu_memory_utilization", "block_size", "enable_chunked_prefill", "nnodes")
_SET += ("disable_log_stats", "per_request_spec_decode_metrics")


@dataclass
class VllmConfig(ChildConfig, key="engine.vllm"):
    python: str = key(
        ".venv-vllm/bin/python",
        "Python of an environment with vLLM: a path within the checkout, or absolute. Empty: this one.",
    )
    SET = MappingProxyType(
        {
            "dtype": "engine.dtype",
            "tensor_parallel_size": "engine.tensor_parallel",
            "prefill_context_parallel_size": "engine.tensor_parallel",
            "max_model_len": "engine.vllm.max_seq_len",
            "max_num_seqs": "engine.max_batch",
            "kv_cache_memory_bytes": "engine.kv_cache_bytes",
            "enable_prefix_caching": "engine.vllm.prefix_reuse",
            "enable_sleep_mode": "engine.sleep",
            "sleep_preserve_parameter_names": "engine.draft_model",
            "enforce_eager": "engine.cuda_graphs",
            "enable_return_routed_experts": "mismatch.replay_routing",
            "speculative_config": "engine.draft_tokens",
        }
        | dict.fromkeys(_SET, "")
    )


def same_minor(version: str) -> bool:
    """Return whether an installed vLLM is of the same minor release as the supported one."""
    return version.split(".")[:2] == VERSION.split(".")[:2]


def check_model(cfg: Config, model: ModelConfig) -> None:
    """Check that vLLM serves the model here. Raises ConfigError."""
    shares = request_shares(cfg.engine.vllm.args, cfg.engine.tensor_parallel)
    if shares > 1 and not model.moe.num_experts:
        hint = "Lower engine.tensor_parallel instead: then there are more replicas."
        raise ConfigError(SHARES, shares, "1 for a model without experts", hint)
    check_shape(model)


def check_shape(model: ModelConfig) -> None:
    """Check that vLLM has this project's model of a shape. Raises ConfigError."""
    traits, attention = model.traits, model.attention
    if "vllm" not in traits.served_by:
        expected = f"one of {', '.join(served_by('vllm'))} with engine.name=vllm"
        raise ConfigError("model.family", model.family, expected, f"{traits.vllm_refused} engine=native serves it.")
    # where config.json must switch windows on, vLLM gives all layers the same window
    if traits.window_switch and len({attention.is_local(layer) for layer in range(model.num_layers)}) > 1:
        expected = f"0, or all layers local, with engine.name=vllm and model.family={model.family}"
        raise ConfigError("model.attention.window", attention.window, expected, "engine=native serves it.")
    if traits.vllm_divides_hidden and model.kv_channels * model.num_heads != model.hidden_size:
        expected = f"hidden_size / num_heads = {model.hidden_size // model.num_heads} with engine.name=vllm and Qwen 2"
        raise ConfigError("model.head_dim", model.kv_channels, expected)
    for name, value in traits.vllm_fixed:
        if value_of(model, name) != value:
            expected = f"{value} with engine.name=vllm and model.family={model.family}"
            raise ConfigError(f"model.{name}", value_of(model, name), expected, "engine=native serves it.")


def request_shares(args: Mapping[str, Any], width: int) -> int:
    """Return the number of shares of a replica's `width` ranks with requests of their own. Raises ConfigError."""
    shares = args.get(DATA_PARALLEL, 1)
    if not isinstance(shares, int) or shares < 1 or width % shares:
        raise ConfigError(SHARES, shares, f"a divisor of engine.tensor_parallel={width}")
    return shares
