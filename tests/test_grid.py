"""Some random models of every family; many more: `python -m tests.grid`."""

import pytest

from aligner.families import FAMILIES
from tests import grid

pytestmark = pytest.mark.multirank


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_equal_transformers(ranks, tmp_path, family, seed):
    grid.compare(grid.draw(family, seed), str(tmp_path / "hf"), ranks)


def test_draws_are_many():
    """Or the comparison would say little: of each family's keys every kind of value, and every rotary scaling."""
    drawn = [grid.draw(family, seed) for family in FAMILIES for seed in range(30)]
    assert {cfg.rope_scaling.type for cfg in drawn if cfg.rope_scaling.scales} == set(grid.ROPE_TYPES)
    for family, traits in FAMILIES.items():
        for key in traits.varies:
            section, _, name = key.rpartition(".")
            own = [cfg for cfg in drawn if cfg.family == family]
            by_name = {str(getattr(getattr(cfg, section) if section else cfg, name)) for cfg in own}
            assert len(by_name) > 1, (family, key)
