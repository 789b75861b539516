"""Rules that adapters (`model.lora`) impose on a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.rule import Rule, rules

if TYPE_CHECKING:
    from aligner.config.schema import Config


def reference_rules(key: str, others: str = "model|stored") -> tuple[Rule, ...]:
    """Return the rules against a reference that differs from the start of training; `others`: its values with weights
    of their own."""
    return rules(f"""
model.lora.quantize_base!=none {key}={others} => {key}
    | the policy's own model with model.lora.quantize_base: training starts from the quantized weights
model.lora.init {key}={others} => {key}
    | the policy's own model with model.lora.init: training starts from that adapter, which no other has
""")


def shares_weights(cfg: Config) -> bool:
    """Return whether the reference, if there is one, is the policy's own model."""
    wants_copy = cfg.stage.name in ("dpo", "online_dpo") and cfg.algorithm.preference.reference == "model"
    return cfg.model.lora.rank > 0 and not wants_copy
