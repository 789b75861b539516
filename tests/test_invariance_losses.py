"""The table of `tests.invariance` has a row for every loss and advantage that a run may ask for."""

from aligner.config.sections.algorithm import GROUP_BASELINES, OTHER_BASELINES, POLICY_LOSSES
from aligner.ops.rl.policy_loss import POLICY_LOSSES as REGISTERED
from aligner.ops.rl.preference import TABLE
from tests import invariance, invariance_jobs, invariance_losses

# registered, and in no row: name -> why
EXCEPTIONS: dict[str, str] = {}


def missing(registered, covered):
    return sorted(set(registered) - set(covered) - set(EXCEPTIONS))


def test_every_row_is_of_the_command():
    others = {"sft_dft", "opsd", "sdpo", "distill_spans"}
    assert set(invariance.LOSSES) == {*invariance_losses.POLICY, *invariance_losses.PAIRS, *others}
    assert set(invariance.STAGES) == {*invariance.PLAIN, *invariance.LOSSES}


def test_every_policy_loss_and_advantage_has_a_row():
    """A row of grpo has ppo's loss and grpo's advantage."""
    rows = invariance_losses.POLICY.values()
    assert missing({*REGISTERED, *POLICY_LOSSES}, {row.policy_loss for row in rows}) == []
    assert missing(("gae", *GROUP_BASELINES, *OTHER_BASELINES), {row.advantage for row in rows}) == []


def test_every_loss_of_pairs_has_a_row():
    rows = (invariance_jobs.ROWS, invariance_jobs.BY_RANK, *invariance_losses.PAIRS.values())
    assert missing(TABLE, {name for row in rows for name in row.loss}) == []


def test_exceptions_are_registered_and_have_a_reason():
    known = {*REGISTERED, "gae", *GROUP_BASELINES, *OTHER_BASELINES, *TABLE}
    assert set(EXCEPTIONS) <= known and all(EXCEPTIONS.values())
