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
import socket
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from aligner.cluster.env import RankEnv
from aligner.cluster.handshake import LOOPBACK, seal_objects, shake_hands
from aligner.cluster.seal import VARIABLE, job_secret


def meet(env: RankEnv, timeout_s: float, folder: Path) -> dist.Store:
    """Return the store of all ranks. The job's secret is of `folder`. Raises PeerError if another party does not know
    it."""
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
    origin, expected = f"MASTER_ADDR={address}:{port}", f"one run.dir (or {VARIABLE}) on all nodes"
    seal_objects(shake_hands(store, rank, world, secret, origin, expected))
    return store


def _listen(address: str, port: int) -> int | None:
    """Open a socket on the interface of that address only. None for a name, which hosts may resolve to different
    addresses, and where it cannot be bound. torch then listens on all interfaces, or says why it cannot."""
    with suppress(ValueError, OSError):
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN).detach()
    return None
