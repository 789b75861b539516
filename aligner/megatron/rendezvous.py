"""Rendezvous of the ranks of a job, closed to everybody else.

The store of torch.distributed takes orders from whoever connects, and its object collectives unpickle what comes,
which executes code. So the store listens only where ranks are, as far as that is known. Before the first collective
ranks prove to each other that they know the job's secret. Every object carries a signature that is checked before it
is unpickled. Who reaches the ports can still disturb a run, and change numbers on their way
(docs/explanation/security.md).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import pickle
import secrets
import socket
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.cluster.env import RankEnv
from aligner.cluster.seal import VARIABLE, Seal, job_secret
from aligner.errors import PeerError

LOOPBACK = "127.0.0.1"
NONCE_BYTES = 16
HELLO, MET, PROOF, WELCOME = (f"aligner/meet/{name}" for name in ("hello", "met", "proof", "welcome"))


def meet(env: RankEnv, timeout_s: float, folder: Path) -> tuple[dist.Store, Seal]:
    """Return the store of all ranks, and the seal of this start. The job's secret is of `folder`. Raises PeerError if
    another party does not know it."""
    secret = job_secret(folder)
    timeout = datetime.timedelta(seconds=timeout_s)
    rank, world, address, port = env.rank, env.world_size, env.master_addr, env.master_port
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves it
        store: dist.Store = dist.TCPStore(address, port, world, False, timeout)
    else:
        if env.one_host:
            address = LOOPBACK
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        listener = _listen(address, port) if rank == 0 else None
        store = dist.TCPStore(address, port, world, rank == 0, timeout, master_listen_fd=listener)
    # A rank of another job that has the same port waits there alone until its rank 0, which cannot listen, ends it.
    store = dist.PrefixStore(str(folder), store)
    seal = shake_hands(store, rank, world, secret, f"{address}:{port}")
    seal_objects(seal)
    return store, seal


def _listen(address: str, port: int) -> int | None:
    """Open a socket on the interface of that address only. None for a name, which hosts may resolve to different
    addresses, and where it cannot be bound. torch then listens on all interfaces, or says why it cannot."""
    with suppress(ValueError, OSError):
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN).detach()
    return None


def shake_hands(store: dist.Store, rank: int, world: int, secret: bytes, origin: str) -> Seal:
    """Exchange a random number per rank. The key derives from the secret and all of them, and each rank proves that
    it has the key."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    store.set(f"{HELLO}/{rank}", nonce)
    if rank == 0:
        store.set(MET, b"".join(store.multi_get([f"{HELLO}/{r}" for r in range(world)])))
    met = store.get(MET)
    seal = Seal(Seal(secret).mac(met, "session"))
    store.set(f"{PROOF}/{rank}", seal.mac(b"", f"proof {rank}"))
    if rank == 0:
        proofs = store.multi_get([f"{PROOF}/{r}" for r in range(world)])
        unknown = [r for r, proof in enumerate(proofs) if not seal.signed(proof, b"", f"proof {r}")]
        if unknown:
            raise PeerError(
                f"rank {unknown[0]} of {world} does not know this job's secret: expected one run.dir (or {VARIABLE}) "
                f"on all nodes, and nobody else at MASTER_ADDR={origin}"
            )
        store.set(WELCOME, seal.mac(b"", "welcome"))
    fresh = met[rank * NONCE_BYTES : (rank + 1) * NONCE_BYTES] == nonce and len(met) == world * NONCE_BYTES
    if not fresh or not seal.signed(store.get(WELCOME), b"", "welcome"):
        raise PeerError(
            f"the process at MASTER_ADDR={origin} does not know this job's secret: expected one run.dir "
            f"(or {VARIABLE}) on all nodes, and nobody else there"
        )
    return seal


def seal_objects(seal: Seal) -> None:
    """Sign the objects of torch's object collectives, for all of this process, from now on."""

    class Pickler:
        def __init__(self, file: BytesIO):
            self.file = file

        def dump(self, value: Any) -> None:
            self.file.write(seal.close(pickle.dumps(value), "object"))

    class Unpickler:
        def __init__(self, file: BytesIO):
            self.file = file

        def load(self) -> Any:
            return pickle.loads(seal.open(self.file.read(), "object"))

    assert distributed_c10d._pickler and distributed_c10d._unpickler  # what `_object_to_tensor` and its inverse call
    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler  # type: ignore[assignment]
