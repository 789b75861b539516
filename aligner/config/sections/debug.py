"""The section `debug`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, REPORT, Section, key
from aligner.config.rule import rules


@dataclass
class DebugConfig(Section, key="debug"):
    skip_refit: bool = key(
        False, "Test hook: keep the engine's old weights; the next refit must notice.", resume=REPORT
    )
    shuffle_rewards: bool = key(False, "Control experiment: permute rewards within each group.", resume=REFUSE)
    record: int = key(
        0, "Keep the last n rollouts, or batches of rows, in <run.dir>. 0: none (rollout_only: all).", least=0
    )
    record_answers: bool = key(False, "Write every answer of the engine to <run.dir>/answers.")
    rollout_only: bool = key(False, "Generate, score, measure and record, without optimizer and update.")
    train_only: str = key("", "A recorded rollout, or a folder of them, to train on in place of an engine's.")
    replay: str = key("", "A run folder whose recorded rollouts to train on (`aligner replay`).")
    until: int = key(
        0, "Step after which to end, unsaved and without an evaluation (`aligner replay`). 0: run.steps.", least=0
    )
    first_step_checks: bool = key(False, "Check before and at the first update what must hold exactly, or stop.")

    RULES = rules("""
train_only => rollout_only, record off
    | with debug.train_only: a recording is neither generated nor recorded again
train_only or rollout_only => replay =
    | with debug.train_only and debug.rollout_only: it is for a run that trains on an engine's
rollout_only => first_step_checks =false | with debug.rollout_only: there is no update
""")
