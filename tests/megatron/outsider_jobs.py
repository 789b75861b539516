"""Jobs of ranks that somebody attacks who knows their address, their port and their code, but not their secret."""

from __future__ import annotations

import os
import pickle
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.engines import bridge as bridge_module
from aligner.engines import roll
from aligner.engines.bridge import Bridge
from aligner.errors import EngineError, PeerError
from aligner.megatron.groups import split_world


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


def gather_from_an_impostor(mark: str) -> tuple[str, bool]:
    """The last rank's connections are somebody else's, who sends a pickle without a signature."""
    told = ""
    if dist.get_rank() == dist.get_world_size() - 1:
        distributed_c10d._pickler = pickle.Pickler
    mine: Any = Touch(mark) if distributed_c10d._pickler is pickle.Pickler else "hello"
    everyone: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, mine)
    except PeerError as error:
        told = str(error)
    return told, Path(mark).exists()


def listeners() -> list[tuple[str, int]]:
    """Where this process listens: addresses, in hexadecimal, and ports."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_rank())  # so that gloo has connected its pairs
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        target = os.readlink(entry) if entry.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def garbage(mark: str) -> tuple[int, list[int]]:
    """Somebody says anything to every port of the ranks, and leaves; then they go on."""
    found = listeners()
    dist.barrier()
    for _, port in found:
        for said in (b"", b"\0" * 64, b"\xff" * 4000, b"GET / HTTP/1.0\r\n\r\n", pickle.dumps(Touch(mark))):
            with socket.create_connection(("127.0.0.1", port), 300) as connection:
                connection.sendall(said)
    dist.barrier()
    everyone = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_rank(), group=dist.new_group(list(range(len(everyone)))))
    return len(found), everyone


def orders(mark: str) -> dict[str, Any]:
    """Rank 1 generates and takes orders from rank 0, while somebody else writes orders too."""
    bridge = Bridge(*split_world(1), 1)
    if bridge.rank == 0:
        while not bridge.store.check(["forged"]):
            pass
        bridge.order("first", 7, True, None)
        said = [answer.value for answer in bridge.answers()]
        bridge.store.set("answered", b"")
        try:
            bridge.order("second")  # which the outsider replaces by the first one, signed as it is
        except EngineError as error:
            return {"answers": said, "lost": str(error)}
    before, roll.REFUSED_S = roll.REFUSED_S, 600.0  # until rank 0 has replaced what is forged
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
    roll.REFUSED_S = 0.1
    try:
        bridge.next_order()
    except PeerError as error:
        refused = str(error)
        bridge.tell(error)
    roll.REFUSED_S = before
    return {"first": first, "refused": refused, "told": bridge._told(), "executed": Path(mark).exists()}
