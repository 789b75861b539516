"""Engines on ranks of their own (engine.ranks): the numbers are those of engines on the trainer's ranks."""

import pytest

from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

STAGE = "tests.run.jobs:run_stage"
# sampled tokens and what follows from them alone; other numbers differ by rounding
EXACT = ("reward/", "response/", "advantage/", "refit/version", "staleness/")


def train(ranks, data, folder, world, *more):
    settings = stages.overrides("grpo", data, folder, "run.steps=3", "run.export=true", *more)
    assert ranks.run(STAGE, world=world, arguments=settings) == [0] * world
    return folder


def test_one_trainer_and_one_engine_are_one_rank(ranks, tiny_data, tmp_path):
    """Rewards, responses, losses, sentinel and weights, bit by bit."""
    more = ["algorithm.kl.coef=0.01", "refit.verify=checksum", "sampling.top_p=0.9"]
    together = train(ranks, tiny_data, tmp_path / "together", 1, *more)
    apart = train(ranks, tiny_data, tmp_path / "apart", 2, "engine.ranks=1", *more)
    assert stages.differences(together, apart) == []
    assert stages.same_weights(together, apart)


@pytest.mark.parametrize(
    "layout, engines, width",
    [("tensor", 1, 1), ("pipeline", 2, 2), ("", 2, 1)],
    ids=["tp2 to 1", "pp2 to 1 x tp2", "dp2 to 2"],
)
def test_two_trainers(ranks, tiny_data, tmp_path, layout, engines, width):
    """As with engines on the trainer's ranks, but for the rounding of other batches."""
    parallel = [f"parallel.{layout}=2"] if layout else []
    own = [f"engine.ranks={engines}", f"engine.tensor_parallel={width}"]
    together = train(ranks, tiny_data, tmp_path / "together", 2, *parallel)
    apart = train(ranks, tiny_data, tmp_path / "apart", 2 + engines, *parallel, *own)
    assert any(record["reward/mean"] > 0 for record in stages.records(apart))
    for one, two in zip(stages.records(together), stages.records(apart), strict=True):
        for name, value in one.items():
            if name.startswith(EXACT):
                assert two[name] == value, name
            elif name.startswith(("policy/", "kl/")):
                assert two[name] == pytest.approx(value, abs=1e-5), name
        assert two["refit/sentinel_error"] < 1e-5
        assert two["refit/wire_bytes"] == two["refit/bytes"] == pytest.approx(one["refit/bytes"] / width, rel=0.1)
    left, right = stages.weights(together), stages.weights(apart)
    assert all((left[name] - right[name]).abs().max() < 1e-4 for name in left)
