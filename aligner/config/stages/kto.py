"""Stage kto: single answers that are desirable or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.adapters import check_reference
from aligner.config.sections.kto import KEY
from aligner.config.stage import LEARNED, SEQUENCES, Stage
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config


def beside(cfg: Config) -> tuple[str, ...]:
    return ("reference",) if cfg.algorithm.kto.second_model else ()


def passes(cfg: Config) -> dict[str, float]:
    """The policy reads the mismatched answers, the reference also the rows themselves where they are not stored."""
    kto = cfg.algorithm.kto
    mismatched = float(kto.kl == "minibatch")
    return {"policy": mismatched, "reference": mismatched + (kto.reference == "model")}


def check(cfg: Config) -> None:
    if cfg.algorithm.kto.reference == "stored":
        check_reference(cfg, "stored", f"{KEY}.reference")
    if cfg.algorithm.kto.kl == "minibatch" and cfg.batch.sequences < 2:
        expected = f"at least 2 with {KEY}.kl=minibatch, better 16 and more: one sample has no mismatched answer"
        raise ConfigError("batch.sequences", cfg.batch.sequences, expected)


STAGE = Stage(
    reads=(*SEQUENCES, "algorithm.kto"),
    unread=LEARNED,
    answers=False,
    beside=beside,
    passes=passes,
    debug=("first_step_checks",),
    check=check,
)
