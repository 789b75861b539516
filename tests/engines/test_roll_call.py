"""Who has come to an order. The store of one process stands for that of the job, and nobody's heart beats by itself;
time passes as rank 0 waits."""

import pytest
import torch.distributed as dist

from aligner.cluster.seal import Seal
from aligner.engines import roll_call
from aligner.engines.roll_call import BEAT_S, RollCall
from tests.clocks import Clock


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(roll_call, "time", made)
    return made


@pytest.fixture
def call(clock):
    return RollCall(dist.HashStore(), Seal(b"of this test"), silent_s=10 * BEAT_S)


def come(call, *ranks):
    for rank in ranks:
        call.store.set(f"aligner/roll/7/{rank}", b"")


def test_a_rank_that_ended_before_its_first_beat_is_lost(call):
    come(call, 1)
    assert call.absent(7, [1, 2]).startswith("rank 2 on an unknown host has ended or hangs")


def test_who_is_lost_at_once_is_told_together(call):
    come(call, 1, 2, 3)
    assert call.absent(7, [1, 2, 3]) == ""
    lost = call.absent(7, [1, 4, 5])
    assert "rank 4 on" in lost and "; rank 5 on" in lost


def test_one_that_beats_is_waited_for_and_one_that_fails_is_not(call, clock):
    for beat in range(40):
        clock.due.append((beat * BEAT_S, lambda beat=beat: call._say(call.store, 2, str(beat))))
    clock.due.append((40 * BEAT_S, lambda: come(call, 2)))
    assert call.absent(7, [2]) == "" and not clock.due
    call.fail(3, "no device")
    assert call.absent(7, [3]).endswith("failed: no device")


def test_an_order_that_is_forgotten_leaves_nothing_behind(call):
    before = call.store.num_keys()
    for number in range(3):
        call.store.set(f"aligner/roll/{number}/1", b"")
        call.admit(number, True)
        assert call.wait(f"aligner/roll/{number}") is True
        call.forget(number, [1])
    assert call.store.num_keys() == before
