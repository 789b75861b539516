"""Stage rm: a reward model, of pairs or of scored answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.stage import COMPARED, LEARNED, SEQUENCES, Stage

if TYPE_CHECKING:
    from aligner.config.schema import Config


def rows(cfg: Config) -> int:
    return 2 if cfg.algorithm.reward_loss.kind == "bradley_terry" else 1


STAGE = Stage(
    reads=(*SEQUENCES, "algorithm.reward_loss"),
    unread=(*LEARNED, *COMPARED, "ptx"),
    scores=True,
    answers=False,
    unit="sequences (pairs)",
    rows=rows,
    debug=("first_step_checks",),
)
