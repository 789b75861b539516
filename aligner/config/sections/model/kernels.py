"""Choice of a model's modules: `model.kernels`, and of its attention: `model.varlen_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.sections.model.config import ModelConfig

KERNELS = ("auto", "own", "te", "invariant")
NEAR = 0.9  # of the tokens of user buffers, from which a micro-batch is padded to them (`megatron/user_buffers.py`)


def te_lacks(model: ModelConfig, unfused: str = "") -> dict[str, str]:
    """Return kind of module -> why a model has none of TransformerEngine's where that is loaded; "" where it has.
    `unfused`: why the machine has no attention for it."""
    cap = model.attention.softcap
    everywhere = {
        f"model.kernels={model.kernels}": model.kernels in ("own", "invariant"),
        "model.dtype=float32: its products round to 10 bits, its attention computes in 16": model.dtype == "float32",
    }
    attention = {
        "model.varlen_attention=true chooses torch's": model.varlen_attention is True,
        f"cuDNN's does not cap scores (model.attention.softcap={cap:g})": bool(cap),
        f"it does not choose tokens, which model.family={model.family} does": model.traits.indexer,
        f"it sees tokens, not entries, which model.family={model.family} has": model.traits.entries,
        unfused: bool(unfused),
    } | _of_width(*_widths(model), model.value_channels)
    linears = {"a base in 4 or 8 bits (model.lora.quantize_base)": model.lora.quantize_base != "none"}
    kinds = {"attention": attention, "linear layers": linears, "norms": {}}
    return {kind: _first(everywhere | reasons) for kind, reasons in kinds.items()}


def unfit_for_varlen(model: ModelConfig) -> str:
    """Return what `model.varlen_attention` does not support of this model; "" if nothing."""
    family = f"which model.family={model.family} has"
    reasons = {
        f"scores are capped (model.attention.softcap={model.attention.softcap:g})": bool(model.attention.softcap),
        f"it does not support attention sinks, {family}": model.traits.sinks,
        f"keys and values must have one width, unlike latent attention's, {family}": bool(model.latent.kv_rank),
    }
    return _first(reasons | _of_width(*_widths(model)))


def _widths(model: ModelConfig) -> tuple[int, ...]:
    return (model.kv_channels, model.attention.global_head_dim or model.kv_channels)


def _of_width(*widths: int) -> dict[str, object]:
    return {
        f"it takes heads of a multiple of 8 up to 256 numbers, and these have {width}": width % 8 or width > 256
        for width in widths
    }


def _first(reasons: Mapping[str, object]) -> str:
    return next((reason for reason, there in reasons.items() if there), "")


def check_te(model: ModelConfig) -> None:
    """Check that TransformerEngine, if it is set, computes the model's attention, and with FP8 or user buffers its
    linear layers. Raises ConfigError."""
    lacks = te_lacks(model)
    if model.kernels == "te" and lacks["attention"]:
        raise ConfigError(
            "model.kernels", "te", f"auto or own: no attention of TransformerEngine: {lacks['attention']}"
        )
    for name in ("fp8", "tp_comm_overlap"):
        if (value := model.megatron.get(name)) and lacks["linear layers"]:
            expected = f"linear layers of TransformerEngine, not {lacks['linear layers']}"
            raise ConfigError(f"model.megatron.{name}", value, expected)
