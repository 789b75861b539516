"""Engines on ranks of their own (engine.ranks): the numbers are those of engines on the trainer's ranks."""

import pytest

from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

STAGE = "tests.run.jobs:run_stage"


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
