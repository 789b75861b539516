"""Process groups of four ranks against plain arithmetic."""

import pytest

from aligner.config.schema import ParallelConfig

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_layouts_of_four_ranks(ranks, tensor, pipeline):
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    data = 4 // (tensor * pipeline)

    def place(rank):  # tensor fastest, then data, then pipeline
        return rank // (tensor * data), rank // tensor % data, rank % tensor

    def same(rank, *axes):
        return [r for r in range(4) if all(place(r)[i] == place(rank)[i] for i in axes)]

    for rank, found in enumerate(ranks.run("tests.megatron.jobs:layout_ranks", world=4, parallel=parallel)):
        pp, dp, tp = place(rank)
        assert found["rank"] == (pp, dp, tp) and found["data"] == data
        assert found["tp"] == same(rank, 0, 1)
        assert found["pp"] == same(rank, 1, 2)
        assert found["dp"] == found["dp_cp"] == same(rank, 0, 2)
        assert found["mp"] == same(rank, 1)
        assert found["cp"] == [rank]
        assert found["intra_dist_opt"] == [0, 1, 2, 3]
        ends = [r for r in found["pp"] if place(r)[0] in (0, pipeline - 1)]
        assert found["embd"] == (ends if rank in ends else None)
        assert found["pos_embd"] == ([rank] if pp == 0 else None)
        assert found["stages"] == (pp == 0, pp == pipeline - 1, found["pp"][-1])


def test_a_world_that_does_not_divide_is_refused(ranks):
    told = ranks.run("tests.megatron.jobs:refused_layout", world=4, parallel=ParallelConfig(tensor=3))
    assert all("critic.parallel" in text and "world size 4" in text for text in told)
