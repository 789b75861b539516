"""What `engine.name=trtllm_engine` serves, and what of `engine` and `engine.trtllm` it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.engine import EngineConfig
    from aligner.config.schema import Config, ModelConfig

NAME = "trtllm_engine"
# those whose class in TensorRT-LLM was read, parameter by parameter
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_EXPERTS = "its layout of experts, one fused tensor for all of them, is not written"
REFUSED = {
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "gemma3_text": "its local layers and norms in TensorRT-LLM's builder were not checked",
}
ONE_RANK = (
    "1 with engine.name=trtllm_engine, one engine per rank: an engine of several ranks needs the launcher's MPI, which "
    "its process must not have. Ranks have replicas instead"
)


def check_engine(engine: EngineConfig) -> None:
    """Raises ConfigError for what does not go with this engine, whatever the model."""
    if engine.tensor_parallel != 1:
        raise ConfigError("engine.tensor_parallel", engine.tensor_parallel, ONE_RANK)
    why = {
        "sleep_weights": "which keeps its weights: they are part of the engine",
        "prefix_reuse": "whose Python runtime shares no prefixes",
        "cuda_graphs": "whose Python runtime captures none",
    }
    for key, reason in why.items():
        if getattr(engine.trtllm, key):
            raise ConfigError(f"engine.trtllm.{key}", True, f"false with engine.name={NAME}, {reason}")


def check_run(cfg: Config, model: ModelConfig) -> None:
    """Raises ConfigError for a model or a run that this engine does not serve."""
    if model.family in REFUSED:
        expected = f"one of {', '.join(FAMILIES)} with engine.name={NAME}: {REFUSED[model.family]}"
        raise ConfigError("model.family", model.family, expected, "engine=trtllm and engine=native serve it.")
    if cfg.run.deterministic:
        expected = f"false with engine.name={NAME}, whose builder picks kernels by timing them"
        raise ConfigError("run.deterministic", True, expected, "engine.name=native repeats bit by bit.")
    response = max(cfg.sampling.max_response_tokens, cfg.eval.max_response_tokens)
    longest = cfg.engine.trtllm.max_seq_len or cfg.data.max_prompt_tokens + response
    check_window(model, min(longest, model.max_position))


def check_window(model: ModelConfig, max_seq_len: int) -> None:
    """Raises ConfigError where a sliding window would matter."""
    window = model.attention.window
    if 0 < window < max_seq_len:
        expected = (
            f"at least {max_seq_len} (the longest prompt and response) or 0 with engine.name={NAME}: its "
            "windows were not checked"
        )
        raise ConfigError("model.attention.window", window, expected)
