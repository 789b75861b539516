"""Choice of a model's modules: `model.kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.sections.model.attention import AttentionConfig, ScalesConfig
from aligner.config.sections.model.rope import RopeScalingConfig
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.sections.model.config import ModelConfig

KERNELS = ("auto", "own", "te")


def unfit_for_te(model: ModelConfig) -> str:
    """Return what TransformerEngine's modules, or Megatron's use of them, do not support of this model; "" if
    nothing."""
    reasons = {
        f"the layers of model.family={model.family}": model.traits.own_layers,
        "adapters (model.lora)": bool(model.lora.rank) or model.lora.quantize_base != "none",
        "a bias after attention (model.qkv_bias)": model.output_bias,
        "biases in the MLP (model.mlp_bias)": model.mlp_bias,
        "this model.attention": model.attention != AttentionConfig(),
        "this model.scales": model.scales != ScalesConfig(),
        "layers of several kinds": model.mixed_layers,
        "this model.rope_scaling: only Llama 3.1's": not _rotates_as_llama(model.rope_scaling),
        "model.varlen_attention, which is another attention": model.varlen_attention is True,
        "model.dtype=float32: its attention computes in 16 bits": model.dtype == "float32",
    }
    return next((reason for reason, there in reasons.items() if there), "")


def unfit_for_varlen(model: ModelConfig) -> str:
    """Return what `model.varlen_attention` does not support of this model; "" if nothing."""
    family, width = f"which model.family={model.family} has", model.kv_channels
    reasons = {
        f"scores are capped (model.attention.softcap={model.attention.softcap:g})": bool(model.attention.softcap),
        f"linear attention takes rows that are padded, {family}": bool(model.linear.key_heads),
        f"it does not support attention sinks, {family}": model.traits.sinks,
        f"keys and values must have one width, unlike latent attention's, {family}": bool(model.latent.kv_rank),
        f"it takes heads of a multiple of 8 up to 256 numbers, and these have {width}": width % 8 or width > 256,
    }
    return next((reason for reason, there in reasons.items() if there), "")


def _rotates_as_llama(scaling: RopeScalingConfig) -> bool:
    shape = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    return scaling.type == "llama3" and (scaling.factor == 1 or shape == (1.0, 4.0, 8192))


def check_te(model: ModelConfig) -> None:
    """Check that TransformerEngine, if it is set, supports the model. Raises ConfigError."""
    reason = unfit_for_te(model) if model.kernels == "te" else ""
    if reason:
        raise ConfigError("model.kernels", "te", f"auto or own: TransformerEngine's modules do not support {reason}")
