"""Who has come to an order. The store of one process stands for that of the job, and nobody's heart beats by itself;
time passes as rank 0 waits."""

import pytest
import torch.distributed as dist

from aligner.cluster.seal import Seal
from aligner.engines import order_barrier
from aligner.engines.order_barrier import BEAT_S, OrderBarrier
from tests.clocks import Clock


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(order_barrier, "time", made)
    return made


@pytest.fixture
def barrier(clock):
    return OrderBarrier(dist.HashStore(), Seal(b"of this test"), silent_s=10 * BEAT_S)


def arrive(barrier, *ranks):
    for rank in ranks:
        barrier.store.set(f"aligner/roll/7/{rank}", b"")


def test_a_rank_that_ended_before_its_first_beat_is_lost(barrier):
    arrive(barrier, 1)
    assert barrier.missing(7, [1, 2]).startswith("rank 2 on an unknown host has ended or hangs")


def test_ranks_lost_at_once_are_reported_together(barrier):
    arrive(barrier, 1, 2, 3)
    assert barrier.missing(7, [1, 2, 3]) == ""
    lost = barrier.missing(7, [1, 4, 5])
    assert "rank 4 on" in lost and "; rank 5 on" in lost


def test_a_rank_that_beats_is_waited_for_and_one_that_fails_is_not(barrier, clock):
    for beat in range(40):
        clock.due.append((beat * BEAT_S, lambda beat=beat: barrier._beat(barrier.store, 2, str(beat))))
    clock.due.append((40 * BEAT_S, lambda: arrive(barrier, 2)))
    assert barrier.missing(7, [2]) == "" and not clock.due
    barrier.fail(3, "no device")
    assert barrier.missing(7, [3]).endswith("failed: no device")


def test_an_order_that_is_forgotten_leaves_nothing_behind(barrier):
    before = barrier.store.num_keys()
    for number in range(3):
        barrier.store.set(f"aligner/roll/{number}/1", b"")
        barrier.admit(number, True)
        assert barrier.wait(f"aligner/roll/{number}") is True
        barrier.forget(number, [1])
    assert barrier.store.num_keys() == before
