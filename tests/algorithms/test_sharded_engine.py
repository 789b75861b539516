"""GRPO on two ranks whose engine is one, over both: the numbers are those of an engine for each rank."""

import pytest

from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

# sampled tokens and what follows from them alone; other numbers differ by rounding
EXACT = ("reward/", "response/", "advantage/", "refit/version", "staleness/")


def train(ranks, data, folder, *overrides):
    settings = stages.overrides("grpo", data, folder, "run.steps=2", "run.export=true", *overrides)
    assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=settings) == [0, 0]
    return folder


@pytest.mark.parametrize("own", [(), ("model=tiny_moe", "parallel.expert=2")], ids=["dense", "experts"])
def test_the_same_numbers_as_an_engine_for_each_rank(ranks, tiny_data, tmp_path, own):
    layout = "parallel.tensor=2", *own
    apart = train(ranks, tiny_data, tmp_path / "apart", *layout)
    together = train(ranks, tiny_data, tmp_path / "together", *layout, "engine.tensor_parallel=2")
    assert any(record["reward/mean"] > 0 for record in stages.records(apart))
    for one, two in zip(stages.records(apart), stages.records(together), strict=True):
        for name, value in one.items():
            if name.startswith(EXACT):
                assert two[name] == value, name
            elif name.startswith(("policy/", "kl/")):
                assert two[name] == pytest.approx(value, abs=1e-5), name
        assert two["refit/bytes"] < 0.6 * one["refit/bytes"] and two["refit/wire_bytes"] == 0 < one["refit/wire_bytes"]
        assert two["refit/sentinel_error"] < 1e-5
    left, right = stages.weights(apart), stages.weights(together)
    assert all((left[name] - right[name]).abs().max() < 1e-4 for name in left)
