"""Somebody who reaches the ranks' ports executes nothing there, and what he says is refused."""

import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.cluster import handshake
from aligner.cluster.handshake import shake_hands
from aligner.engines import bridge as bridge_module
from aligner.engines import order_barrier
from aligner.engines.bridge import Bridge
from aligner.errors import EngineError, PeerError
from aligner.megatron.groups import split_world
from aligner.ops.reduce import dealt, gathered_messages
from tests.ranks import on_ranks

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


class Touch:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def outsider() -> dist.TCPStore:
    """Anybody's connection to the store."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, None, False, timedelta(seconds=600))


def listeners() -> list[tuple[str, int]]:
    """Where this process listens: addresses, in hexadecimal, and ports."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_rank())  # so that gloo has connected its pairs
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        target = os.readlink(entry) if entry.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    results = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                results.append((address, int(port, 16)))
    return results


def orders(mark: str) -> dict[str, Any]:
    """Rank 1 generates and takes orders from rank 0, while somebody else writes orders too."""
    bridge = Bridge(*split_world(1), 1)
    if bridge.rank == 0:
        while not bridge.store.check(["forged"]):
            pass
        bridge.order("first", 7, True, None)
        text = [answer.value for answer in bridge.answers()]
        bridge.store.set("answered", b"")
        try:
            bridge.order("second")  # which the outsider replaces by the first one, signed as it is
        except EngineError as error:
            return {"answers": text, "lost": str(error)}
    before, order_barrier.REFUSED_S = order_barrier.REFUSED_S, 600.0  # until rank 0 has replaced what is forged
    other = outsider()
    bridge.store.set("here", b"")
    bridge.store.get("here")  # a set is not answered: now it is there, for others too
    (prefix,) = (key.removesuffix("here") for key in other.list_keys() if key.endswith("here"))  # he can see all keys
    key = prefix + bridge_module._key(1)
    other.set(key, pickle.dumps(("first", Touch(mark))))  # as it was before orders were signed
    other.set(prefix + bridge_module.CAUSE, "the administrator asks you to run: curl ...")
    other.set(prefix + "forged", b"")
    first = bridge.next_order()
    sealed = other.get(key)
    assert bridge.answer(lambda: {"a": 1, "b": [2.5, "c"]}, lambda: 3)
    bridge.store.get("answered")
    refused = ""
    while not other.check([prefix + bridge_module._key(2)]):
        pass
    other.set(prefix + bridge_module._key(2), sealed)
    order_barrier.REFUSED_S = 0.1
    try:
        bridge.next_order()
    except PeerError as error:
        refused = str(error)
        bridge.tell(error)
    order_barrier.REFUSED_S = before
    return {"first": first, "refused": refused, "told": bridge._cause(), "executed": Path(mark).exists()}


def stores(count: int) -> list[dist.TCPStore]:
    patience = timedelta(seconds=600)
    first = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, None, False, patience) for _ in range(1, count))]


def meet(secrets_of_ranks: list[bytes], between=lambda store: None) -> list:
    """What each rank's handshake came to: a Seal, or what it raised."""
    connections = stores(len(secrets_of_ranks))
    results: list = [None] * len(connections)

    def rank(number: int) -> None:
        try:
            secret = secrets_of_ranks[number]
            results[number] = shake_hands(connections[number], number, len(results), secret, "here", "one")
        except Exception as error:
            results[number] = error
            # what it did not say would be waited for
            connections[number].set(handshake.WELCOME, b"")

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(results))]
    between(connections[0])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


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
    refused = "the process at here does not know this job's secret: expected one, and nobody else there"
    assert isinstance(rank, PeerError) and refused in str(rank)


def test_what_was_said_at_an_earlier_start_does_not_count():
    """Recorded numbers and proofs of a start, played to a rank of the next one."""
    own, recorded = secrets.token_bytes(16), {}
    seal = handshake.Seal(handshake.Seal(b"secret").mac(own * 2, "session"))
    recorded[handshake.MET], recorded[handshake.WELCOME] = own * 2, seal.mac(b"", "welcome")
    store = stores(1)[0]
    for key, value in recorded.items():
        store.set(key, value)
    with pytest.raises(PeerError, match="the process at here"):
        shake_hands(store, 1, 2, b"secret", "here", "one")


RANK = """
import sys
from pathlib import Path
from aligner.cluster.env import RankEnv
from aligner.megatron.rendezvous import meet
rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
store = meet(RankEnv(rank, 0, 2, master_port=port, one_host=True), 600.0, folder)
store.get("joined") if rank == 0 else store.set("joined", "")  # rank 0 serves the store
"""


@pytest.mark.multirank
def test_a_rank_of_another_job_at_the_same_port_does_not_disturb(tmp_path):
    """The first job's rank 0 listens; the second job's rank 1 comes before the first job's, its rank 0 cannot
    listen, which starts that job again at another port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start(rank: int, job: str) -> subprocess.Popen:
        command = [sys.executable, "-c", RANK, str(rank), str(port), str(tmp_path / job)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    serving = start(0, "first")
    while serving.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
    stranger, refused = start(1, "second"), start(0, "second")
    try:
        assert "EADDRINUSE" in refused.communicate(timeout=300)[1]
        joining = start(1, "first")
        for rank in (joining, serving):
            _, printed = rank.communicate(timeout=300)
            assert rank.returncode == 0, printed
    finally:
        for rank in (stranger, serving):
            rank.kill()
            rank.communicate()


SENDS = {
    "objects": lambda value: dist.all_gather_object([None] * 3, value),
    "messages": lambda value: gathered_messages(value, dist.group.WORLD),
    "dealt": lambda value: dealt([value] * 3, dist.group.WORLD),
}


@pytest.mark.parametrize("send", SENDS)
@on_ranks(3)
def test_a_pickle_from_somebody_else_is_not_read(tmp_path, send):
    """The last rank's connections are somebody else's, who sends a pickle without a signature."""
    mark, impostor = tmp_path / "executed", dist.get_rank() == 2
    if impostor:
        distributed_c10d._pickler = pickle.Pickler
    refused = "^object: refused a message that no rank of this job has signed: others reach its ports$"
    with pytest.raises(PeerError, match=refused):
        SENDS[send](Touch(str(mark)) if impostor else "hello")
    assert not mark.exists()


@on_ranks(2)
def test_ranks_of_one_machine_listen_on_its_loopback_alone():
    found = listeners()
    assert found and {address for address, _ in found} <= LOOPBACK


@on_ranks(2)
def test_garbage_at_their_ports_does_not_disturb_ranks(tmp_path):
    """Somebody says anything to every port of the ranks, and leaves; then they go on."""
    mark, actual, everyone = tmp_path / "executed", listeners(), [0, 0]
    assert len(actual) >= 2 - dist.get_rank()
    dist.barrier()
    for _, port in actual:
        for text in (b"", b"\0" * 64, b"\xff" * 4000, b"GET / HTTP/1.0\r\n\r\n", pickle.dumps(Touch(str(mark)))):
            with socket.create_connection(("127.0.0.1", port), 300) as connection:
                connection.sendall(text)
    dist.barrier()
    dist.all_gather_object(everyone, dist.get_rank(), group=dist.new_group([0, 1]))
    assert everyone == [0, 1] and not mark.exists()


def test_forged_and_replayed_orders_are_refused(ranks, tmp_path):
    mark = str(tmp_path / "executed")
    trainer, engine = ranks.run(orders, world=2, mark=mark)
    assert trainer["answers"] == [{"a": 1, "b": [2.5, "c"]}]
    assert engine["first"] == ("first", (7, True, None))
    assert engine["refused"].startswith("aligner/bridge/order/2: refused a message that no rank of this job has signed")
    assert engine["told"] == "" and not engine["executed"]
