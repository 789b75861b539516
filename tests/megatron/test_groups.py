"""Process groups of four ranks against plain arithmetic."""

import contextlib
import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from aligner.cluster.env import RankEnv
from aligner.cluster.seal import VARIABLE
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import LayoutError
from aligner.megatron import groups
from tests.ranks import COLLECTIVE_TIMEOUT_S, on_ranks

pytestmark = pytest.mark.multirank


# ---- groups.py


def layout_ranks(parallel: ParallelConfig) -> dict:
    layout = groups.build_layout(parallel)
    names = ("tp", "pp", "dp", "mp", "dp_cp", "embd", "pos_embd", "intra_dist_opt", "cp")
    by_name = {n: getattr(layout.pgs, n) for n in names}
    return {n: g and dist.get_process_group_ranks(g) for n, g in by_name.items()} | {
        "rank": (layout.pp_rank, layout.dp_rank, layout.tp_rank),
        "stages": (layout.is_first_stage, layout.is_last_stage, layout.last_stage_rank),
        "data": layout.data,
    }


def groups_of(layout: groups.Layout) -> list[dist.ProcessGroup]:
    """In an order that all ranks share: each may wait for the other of a pair otherwise, all round the world."""
    return list(dict.fromkeys(g for g in (*vars(layout.pgs).values(), layout.peers) if g is not None))


def open_sockets() -> int:
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_layouts_of_four_ranks(ranks, tensor, pipeline):
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    data = 4 // (tensor * pipeline)

    def place(rank):  # tensor fastest, then data, then pipeline
        return rank // (tensor * data), rank // tensor % data, rank % tensor

    def same(rank, *axes):
        return [r for r in range(4) if all(place(r)[i] == place(rank)[i] for i in axes)]

    for rank, result in enumerate(ranks.run(layout_ranks, world=4, parallel=parallel)):
        pp, dp, tp = place(rank)
        assert result["rank"] == (pp, dp, tp) and result["data"] == data
        assert result["tp"] == same(rank, 0, 1)
        assert result["pp"] == same(rank, 1, 2)
        assert result["dp"] == result["dp_cp"] == same(rank, 0, 2)
        assert result["mp"] == same(rank, 1)
        assert result["cp"] == [rank]
        assert result["intra_dist_opt"] == [0, 1, 2, 3]
        ends = [r for r in result["pp"] if place(r)[0] in (0, pipeline - 1)]
        assert result["embd"] == (ends if rank in ends else None)
        assert result["pos_embd"] == ([rank] if pp == 0 else None)
        assert result["stages"] == (pp == 0, pp == pipeline - 1, result["pp"][-1])


@on_ranks(4)
def test_a_world_that_does_not_divide_is_refused():
    with pytest.raises(LayoutError) as caught:
        groups.build_layout(ParallelConfig(tensor=3))
    assert "parallel" in str(caught.value) and "world size 4" in str(caught.value)


@on_ranks(4)
def test_groups_connect_when_they_speak_and_wait_as_long_as_the_world():
    """A socket to listen for each group, not one for each other rank in it; once each has done what CPU tensors do,
    two more."""
    known = groups_of(groups.build_layout(ParallelConfig()))  # and those of the job before are gone
    for _ in range(2):  # the first time a peer may still be connecting to this rank when it has all that it needs
        dist.all_gather_object([None] * 4, 0)
        dist.barrier()
    before, now = -1, open_sockets()
    while before != now:  # those of the job before it close by and by
        time.sleep(0.3)
        before, now = now, open_sockets()
    dist.barrier()
    layout = groups.build_layout(ParallelConfig(tensor=2))
    new = [g for g in groups_of(layout) if g not in known]
    made = open_sockets()
    dist.barrier()  # a peer that speaks already would connect to this rank before it has counted
    for group in new:
        dist.all_gather_object([None] * group.size(), 0, group=group)
        dist.broadcast_object_list([0], group_src=0, group=group)
    assert [g.size() for g in new] == [2, 2] and made - before == 2 and open_sockets() - before == 2 + 2
    limits = {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in new}
    assert limits == {COLLECTIVE_TIMEOUT_S}


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
