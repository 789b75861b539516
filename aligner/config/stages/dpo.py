"""Stage dpo: preference losses on pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.stage import SEQUENCES, Stage

if TYPE_CHECKING:
    from aligner.config.schema import Config


def rows(cfg: Config) -> int:
    return 2


def beside(cfg: Config) -> tuple[str, ...]:
    return ("reference",) if cfg.algorithm.preference.reference == "model" else ()


STAGE = Stage(
    reads=(*SEQUENCES, "algorithm.preference"),
    answers=False,
    unit="sequences (pairs)",
    rows=rows,
    beside=beside,
    debug=("first_step_checks",),
)
