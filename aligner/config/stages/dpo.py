"""Stage dpo: preference losses on pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.adapters import check_reference
from aligner.config.sections.preference import KEY
from aligner.config.stage import LEARNED, SEQUENCES, Stage
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config


def rows(cfg: Config) -> int:
    return 2


def beside(cfg: Config) -> tuple[str, ...]:
    return ("reference",) if cfg.algorithm.preference.reference in ("model", "adapter") else ()


def check(cfg: Config) -> None:
    """Also stage online_dpo's."""
    check_reference(cfg, cfg.algorithm.preference.reference)
    every = cfg.algorithm.preference.sync_every
    if every and cfg.model.lora.rank:
        expected = "0 with model.lora: the product of two mixed factors is no mixture of their products"
        raise ConfigError(f"{KEY}.sync_every", every, expected)
    if every and "weights" in cfg.memory.offload:
        expected = f"without weights with {KEY}.sync_every: checkpoints hold the reference, which has to be there"
        raise ConfigError("memory.offload", cfg.memory.offload, expected)


STAGE = Stage(
    reads=(*SEQUENCES, "algorithm.preference"),
    unread=LEARNED,
    answers=False,
    unit="sequences (pairs)",
    rows=rows,
    beside=beside,
    debug=("first_step_checks",),
    check=check,
)
