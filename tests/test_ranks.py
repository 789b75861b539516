"""The pool itself: a failure is told and does not hang or spoil what comes after."""

import os

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks

pytestmark = pytest.mark.multirank


def report(fail: int = -1, die: tuple[int, ...] = ()):
    import torch

    rank = dist.get_rank()
    if rank == fail:
        raise ValueError(f"broken on purpose on {rank}")
    if rank in die:
        os._exit(3)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)  # the others wait here for the rank that failed
    return rank, dist.get_world_size(), int(total), os.getpid()


def test_worlds_follow_one_another_in_the_same_processes(ranks):
    pids = set()
    for world in (1, 4, 2, 1):
        results = ranks.run(report, world=world)
        assert [r[:3] for r in results] == [(i, world, world * (world + 1) // 2) for i in range(world)]
        pids |= {r[3] for r in results}
    assert len(pids) == 4


@pytest.mark.parametrize("world", [1, 3])
@on_ranks()
def test_a_body_runs_on_as_many_ranks_as_its_argument_says(world, tmp_path):
    assert dist.get_world_size() == world
    (tmp_path / str(dist.get_rank())).touch(exist_ok=False)


@on_ranks(2)
def equal(numbers):
    assert numbers == {"a": dist.get_rank()}


@pytest.mark.slow
def test_a_failure_is_reported_and_the_pool_goes_on(monkeypatch):
    from tests import ranks
    from tests.ranks import RankError, Ranks

    pool = Ranks(2)  # its own: the session's ranks stay alive
    try:
        with monkeypatch.context() as patch, pytest.raises(RankError, match="broken on purpose on 1"):
            patch.setattr(ranks, "GRACE_S", 0.5)  # the other one hangs
            pool.run(report, world=2, fail=1)
        with pytest.raises(RankError, match=r"(?s)^rank 1: .*assert \{'a': 0\} == \{'a': 1\}"):
            equal(numbers={"a": 0}, ranks=pool)
        for die in ((0,), (0, 1)):
            with pytest.raises(RankError, match="rank 0: the process ended"):
                pool.run(report, world=2, die=die)
        assert pool.run(report, world=2)[1][:3] == (1, 2, 3)
    finally:
        pool.close()
