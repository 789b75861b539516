"""Rows of a second stream in the policy's own steps: their gradient is added, their numbers stay apart."""

import pytest

from aligner.config.sections.parallel import ParallelConfig
from tests.tiny import LLAMA, MOE, relative

LAYOUTS = [
    (1, LLAMA, ParallelConfig()),
    (2, LLAMA, ParallelConfig()),
    (2, LLAMA, ParallelConfig(pipeline=2)),
    (2, MOE, ParallelConfig(expert=2)),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("world, cfg, parallel", LAYOUTS)
def test_the_gradient_is_the_sum_and_the_loss_stays_the_stages_own(ranks, world, cfg, parallel):
    def step(**options):
        return ranks.run("tests.roles.jobs:ptx_update", world=world, cfg=cfg, parallel=parallel, **options)[0]

    both, own, alone = step(coef=0.25), step(coef=None), step(coef=1.0, own=0.0)
    for name, start in both["before"].items():
        wanted = own["after"][name] - start + 0.25 * (alone["after"][name] - start)
        assert relative(both["after"][name] - start, wanted) <= 2e-5, name
    assert both["stats"]["policy/loss"] == pytest.approx(own["stats"]["policy/loss"], rel=1e-5)
    assert {name: both["stats"][name] for name in ("seen", "top")} == pytest.approx(
        {name: own["stats"][name] for name in ("seen", "top")}, rel=1e-6
    )
    assert both["stats"]["ptx/loss"] == pytest.approx(ranks.run("tests.roles.jobs:nll_at_one", cfg=cfg)[0], rel=1e-5)
    assert "ptx/loss" not in own["stats"]
