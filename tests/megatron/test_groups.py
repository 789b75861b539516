"""Process groups of four ranks against plain arithmetic."""

import math
import os

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from aligner.cluster.env import RankEnv
from aligner.cluster.seal import VARIABLE
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron import groups
from tests.ranks import COLLECTIVE_TIMEOUT_S

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
    assert all("parallel" in text and "world size 4" in text for text in told)


def test_groups_connect_when_they_speak_and_wait_as_long_as_the_world(ranks):
    """A socket to listen for each group, not one for each other rank in it."""
    for told in ranks.run("tests.megatron.jobs:sockets_of_layout", world=4, parallel=ParallelConfig(tensor=2)):
        assert told["sizes"] == [2, 2] and told["limits"] == {COLLECTIVE_TIMEOUT_S}
        assert told["made"] == 2 and told["used"] == 2 + 2


def test_a_rank_of_1024_opens_few_sockets():
    """By count: what CPU tensors do is a ring (sums, gathers), a tree (what one rank tells the others) or, between
    data-parallel ranks, an all-to-all. Rank 0 serves the store besides, and gathers what each rank has saved."""
    dist.init_process_group("fake", store=FakeStore(), rank=1023, world_size=1024)
    try:
        layout = groups.build_layout(ParallelConfig(tensor=8, pipeline=4, context=2, sequence=True))
        sizes = {name: group.size() for name, group in vars(layout.pgs).items() if group is not None}
        made = len({*vars(layout.pgs).values(), layout.peers} - {None})
    finally:
        dist.destroy_process_group()
    ring = 2
    spoken = (ring + math.log2(1024)) + ring + math.log2(sizes["pp"]) + (sizes["dp"] - 1)  # world, peers, pp, dp
    assert sizes["dp"] == 16 and made + spoken <= 64


def test_a_single_rank_hands_no_secret_on(monkeypatch):
    """It needs none itself; other stages of its batch script may."""
    monkeypatch.setenv(VARIABLE, "ab" * 32)
    groups.init_distributed(RankEnv(), "auto", 60.0)
    groups.leave_distributed()
    assert VARIABLE not in os.environ
