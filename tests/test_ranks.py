"""The pool itself: a failure is told and does not hang or spoil what comes after."""

import os

import pytest

pytestmark = pytest.mark.multirank


def report(fail: int = -1, die: tuple[int, ...] = ()):
    import torch
    import torch.distributed as dist

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
        results = ranks.run("tests.test_ranks:report", world=world)
        assert [r[:3] for r in results] == [(i, world, world * (world + 1) // 2) for i in range(world)]
        pids |= {r[3] for r in results}
    assert len(pids) == 4


@pytest.mark.slow
def test_a_failure_is_told_and_the_pool_goes_on(monkeypatch):
    from tests import ranks
    from tests.ranks import RankError, Ranks

    pool = Ranks(2)  # its own: the session's ranks stay alive
    try:
        with monkeypatch.context() as patch, pytest.raises(RankError, match="broken on purpose on 1"):
            patch.setattr(ranks, "GRACE_S", 0.5)  # the other one hangs
            pool.run("tests.test_ranks:report", world=2, fail=1)
        for die in ((0,), (0, 1)):
            with pytest.raises(RankError, match="rank 0: the process ended"):
                pool.run("tests.test_ranks:report", world=2, die=die)
        assert pool.run("tests.test_ranks:report", world=2)[1][:3] == (1, 2, 3)
    finally:
        pool.close()
