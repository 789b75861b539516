"""The section `debug`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, REPORT, Section, key
from aligner.config.rule import rules


@dataclass
class DebugConfig(Section, key="debug"):
    skip_refit: bool = key(
        False, "Keep the engine's old weights, as a test: the next refit must detect it.", resume=REPORT
    )
    shuffle_rewards: bool = key(False, "Permute rewards within each group, as a control experiment.", resume=REFUSE)
    record: int = key(
        0, "Number of last rollouts, or batches of rows, to record in <run.dir>. 0: none (rollout_only: all).", least=0
    )
    record_answers: bool = key(False, "Write all output of the engine to <run.dir>/answers.")
    rollout_only: bool = key(False, "Generate, score, measure and record, without updates.")
    train_only: str = key("", "Recorded rollout, or folder of them, to train on instead of an engine's.")
    replay: str = key("", "Run folder with recorded rollouts to train on (`aligner replay`).")
    until: int = key(
        0, "Last step of the run, which ends without save and evaluation (`aligner replay`). 0: run.steps.", least=0
    )
    first_step_checks: bool = key(False, "Check the exact identities of the first update, and stop if one fails.")

    RULES = rules("""
train_only => rollout_only, record off
    | with debug.train_only: a recording is neither generated nor recorded again
train_only or rollout_only => replay =
    | with debug.train_only and debug.rollout_only: it is for a run that trains on an engine's
rollout_only => first_step_checks =false | with debug.rollout_only: there is no update
""")
