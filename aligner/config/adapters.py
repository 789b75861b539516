"""What adapters (`model.lora`) decide of a reference, and who merges them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.engines import able
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config

OWN = "algorithm.preference.reference"


def settle_reference(cfg: Config) -> None:
    """Give `reference=auto` its value: what is left out cannot follow the policy."""
    preference = cfg.algorithm.preference
    if preference.reference == "auto":
        preference.reference = "adapter" if cfg.model.lora.rank and not preference.sync_every else "model"


def check_reference(cfg: Config, reference: str, key: str = OWN) -> None:
    """Raise ConfigError for a reference that is not what training starts from."""
    lora = cfg.model.lora
    if reference == "adapter" and not lora.rank:
        raise ConfigError(
            key, reference, "model, stored or none with model.lora.rank=0: there is no adapter to leave out"
        )
    if lora.quantize_base != "none" and reference in ("model", "stored"):
        expected = "the policy's own model with model.lora.quantize_base: training starts from what is held"
        raise ConfigError(key, reference, expected)
    if lora.init and reference in ("model", "stored"):
        expected = "the policy's own model with model.lora.init: training starts from that adapter, which no other has"
        raise ConfigError(key, reference, expected)


def shares_weights(cfg: Config) -> bool:
    """Whether the reference, if there is one, is the policy's own model."""
    wants_copy = cfg.stage.name in ("dpo", "online_dpo") and cfg.algorithm.preference.reference == "model"
    return cfg.model.lora.rank > 0 and not wants_copy


def check_factors(cfg: Config, trains: bool) -> None:
    """Raise ConfigError where engines cannot merge adapters themselves."""
    if cfg.refit.adapters != "factors":
        return
    reason = ""
    if not cfg.model.lora.rank:
        reason = "model.lora.rank=0, which has no factors"
    elif not trains:
        reason = "a stage that trains nothing, or debug.rollout_only: adapters come with training"
    elif not cfg.engine.can.merges_adapters:
        reason = f"engine.name={cfg.engine.name}: the {able('merges_adapters')} engine alone merges"
    elif cfg.engine.quantization != "none":
        reason = f"engine.quantization={cfg.engine.quantization}, which is of merged weights, given whole"
    elif cfg.debug.record_answers:
        reason = "debug.record_answers, whose engine is given whole weights"
    if reason:
        raise ConfigError("refit.adapters", "factors", f"merged with {reason}")
