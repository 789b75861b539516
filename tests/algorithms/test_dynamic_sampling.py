"""Whole runs with dynamic sampling and greedy baselines: resumed exactly, and stopped with what was learned saved."""

import pytest

from aligner.errors import RewardError
from tests import stages


@pytest.fixture
def grpo(tiny_data, tiny_runs, tmp_path):
    """Run or continue a toy GRPO stage in a folder of the test."""

    def run(name, *more):
        start = f"model.init={tiny_runs['sft']}"
        return stages.stage("grpo", tiny_data, tmp_path / name, start, "checkpoint.every=2", "batch.group=8", *more)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["algorithm.filter_groups=true"], ["algorithm.advantage=remax"]])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(grpo, overrides):
    overrides = [*overrides, "algorithm.filter_rounds=40", "optim.schedule=constant"]
    whole = grpo("whole", *overrides, "run.steps=4")
    grpo("parts", *overrides, "run.steps=2")
    parts = grpo("parts", *overrides, "run.steps=4")
    assert not stages.differences(whole, parts) and stages.same_weights(whole, parts)
    records = stages.records(whole)
    if "algorithm.filter_groups=true" in overrides:
        assert all(record["reward/degenerate_groups"] == 0 for record in records)
        assert any(record["filter/dropped_prompts"] > 0 for record in records)


def test_a_batch_that_cannot_be_filled_ends_the_run_and_loses_nothing(grpo, tmp_path):
    """Rewards that never differ: the first rollout fails. After some steps, those are saved."""
    function = tmp_path / "late.py"
    function.write_text(
        "calls = []\n"
        "def late(samples):\n"
        "    calls.append(1)\n"
        "    return [float(i % 2) if len(calls) < 4 else 0.0 for i, _ in enumerate(samples)]\n"
    )
    overrides = [
        f"reward.functions=[{{path: '{function}:late'}}]",
        "reward.workers=1",
        "run.steps=9",
        "checkpoint.every=0",
    ]
    with pytest.raises(RewardError, match=r"algorithm\.filter_rounds=2 rounds, 8 of 8 prompts"):
        grpo("late", *overrides, "algorithm.filter_groups=true", "algorithm.filter_rounds=2")
    steps = [record["step"] for record in stages.records(tmp_path / "late")]
    assert steps and stages.checkpoints(tmp_path / "late") == [steps[-1]]
