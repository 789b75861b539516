"""Somebody who reaches the ranks' ports executes nothing there, and what he says is refused."""

from __future__ import annotations

import secrets
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from aligner.errors import PeerError
from aligner.megatron import rendezvous
from aligner.megatron.rendezvous import shake_hands

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def stores(count: int) -> list[dist.TCPStore]:
    patience = timedelta(seconds=600)
    first = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, None, False, patience) for _ in range(1, count))]


def meet(secrets_of_ranks: list[bytes], between=lambda store: None) -> list:
    """What each rank's handshake came to: a Seal, or what it raised."""
    connections = stores(len(secrets_of_ranks))
    found: list = [None] * len(connections)

    def rank(number: int) -> None:
        try:
            found[number] = shake_hands(connections[number], number, len(found), secrets_of_ranks[number], "here")
        except Exception as error:
            found[number] = error
            # what it did not say would be waited for
            connections[number].set(rendezvous.WELCOME, b"")

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(found))]
    between(connections[0])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_know_the_secret_get_one_key_and_another_one_the_next_time():
    first, second, third = meet([b"secret"] * 3)
    assert first.open(second.close(b"x", "y"), "y") == third.open(first.close(b"x", "y"), "y") == b"x"
    again, _ = meet([b"secret"] * 2)
    with pytest.raises(PeerError):
        again.open(first.close(b"x", "y"), "y")


def test_a_rank_that_does_not_know_the_secret_is_named():
    first, second, third = meet([b"secret", b"secret", b"guess"])
    assert isinstance(first, PeerError) and "rank 2 of 3 does not know this job's secret" in str(first)
    assert isinstance(second, PeerError) and isinstance(third, PeerError)


def test_a_store_that_is_somebody_elses_is_left():
    _, rank = meet([b"guess", b"secret"])
    assert isinstance(rank, PeerError) and "who answers at MASTER_ADDR=here does not know this job's secret" in str(
        rank
    )


def test_what_was_said_at_an_earlier_start_does_not_count():
    """Recorded numbers and proofs of a start, played to a rank of the next one."""
    own, recorded = secrets.token_bytes(16), {}
    seal = rendezvous.Seal(rendezvous.Seal(b"secret").mac(own * 2, "session"))
    recorded[rendezvous.MET], recorded[rendezvous.WELCOME] = own * 2, seal.mac(b"", "welcome")
    store = stores(1)[0]
    for key, value in recorded.items():
        store.set(key, value)
    with pytest.raises(PeerError, match="who answers"):
        shake_hands(store, 1, 2, b"secret", "here")


def test_a_pickle_from_somebody_else_is_not_read(ranks, tmp_path):
    mark = str(tmp_path / "executed")
    first, second, impostor = ranks.run("tests.megatron.outsider_jobs:gather_from_an_impostor", world=3, mark=mark)
    assert first == second and not impostor[1]
    assert first == ("object: refused a message that no rank of this job has signed: others reach its ports", False)


def test_ranks_of_one_machine_listen_on_its_loopback_alone(ranks):
    for found in ranks.run("tests.megatron.outsider_jobs:listeners", world=2):
        assert found and {address for address, _ in found} <= LOOPBACK


def test_garbage_at_their_ports_does_not_disturb_ranks(ranks, tmp_path):
    mark = tmp_path / "executed"
    (first, everyone), (second, same) = ranks.run("tests.megatron.outsider_jobs:garbage", world=2, mark=str(mark))
    assert first >= 2 and second >= 1 and everyone == same == [0, 1] and not mark.exists()


def test_forged_and_replayed_orders_are_refused(ranks, tmp_path):
    mark = str(tmp_path / "executed")
    trainer, engine = ranks.run("tests.megatron.outsider_jobs:orders", world=2, mark=mark)
    assert trainer["answers"] == [{"a": 1, "b": [2.5, "c"]}]
    assert engine["first"] == ("first", (7, True, None))
    assert engine["refused"].startswith("aligner/bridge/order/2: refused a message that no rank of this job has signed")
    assert engine["told"] == "" and not engine["executed"]
