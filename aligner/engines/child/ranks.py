"""One rank of an engine of several, in a process of its own. The processes meet through torch.distributed by
themselves: the packages would start them by MPI, Ray or on one node only.

  listen   the first rank opens two ports
  join     all ranks: connections by which a process learns that another one has ended; then the process group

A `RankWorker` does both.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import time
import traceback
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from aligner.cluster.handshake import LOOPBACK, seal_objects, shake_hands
from aligner.cluster.seal import Seal
from aligner.engines.child.process import PEER_ENDED
from aligner.engines.child.worker import BaseWorker, Settings
from aligner.errors import EngineError

# while the trainer trains, a rank waits in a collective for the first one's next request
IDLE = timedelta(days=30)
_OPEN: list[Any] = []  # of the first rank: the store, and the socket that listens


@contextmanager
def ending_all(line: Lifeline | None) -> Iterator[None]:
    """End this process after an error in work of all ranks, and so the peers, which would wait for this one in a
    collective. Its trainer shows the error from its output. An engine of one rank goes on: `line` is None."""
    try:
        yield
    except Exception:
        if line is None:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def listen(host: str) -> tuple[int, int]:
    """Open the ports of the first rank, by which the others join it: of the loopback, or of all interfaces, as a name
    may have other addresses elsewhere. Returns them."""
    first, second = (socket.create_server(("" if host != LOOPBACK else host, 0), backlog=128) for _ in range(2))
    ports = first.getsockname()[1], second.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, ports[0], None, True, wait_for_workers=False, master_listen_fd=first.detach())
    _OPEN[:] = store, second
    return ports


class Lifeline:
    """End this process when a peer has ended: otherwise it would wait for that peer in a collective. Its own rank's
    trainer tells why it ended. End it also when the trainer has ended. `peers`: connections from the first rank to
    each other one."""

    def __init__(self, peers: list[socket.socket]):
        self.peers, self.leaves, self.parent = peers, False, os.getppid()
        Thread(target=self._watch_trainer, daemon=True).start()
        for peer in peers:
            peer.settimeout(None)
            Thread(target=self._watch, args=(peer,), daemon=True).start()

    def _watch_trainer(self) -> None:
        while os.getppid() == self.parent:
            time.sleep(0.5)
        self.end()

    def end(self) -> None:
        """End this process without a word, and so the peers."""
        os._exit(PEER_ENDED)

    def _watch(self, peer: socket.socket) -> None:
        goodbye = b""
        with suppress(OSError):
            goodbye = peer.recv(1)
        if not goodbye and not self.leaves:
            os.write(2, b"the process of another rank of this engine has ended\n")
            self.end()

    def leave(self, well: bool = True) -> None:
        """Leave the others, which stay; if not `well`, they end."""
        self.leaves = True
        for peer in self.peers:
            with suppress(OSError):
                if well:
                    peer.sendall(b".")
                else:
                    peer.shutdown(socket.SHUT_RDWR)


def join(settings: Settings) -> Lifeline:
    """Join the engine's other ranks. Raises EngineError where they cannot be reached."""
    meeting, rank, ranks = settings.meeting, settings.rank, settings.tensor_parallel
    assert meeting is not None
    host, ports, secret = meeting.hosts[0], meeting.ports, meeting.secret
    deadline = time.monotonic() + meeting.limit_s
    peers: list[socket.socket] = []
    proof = Seal(secret).mac(b"", "line")
    try:
        if rank == 0:
            store, server = _OPEN
            with server:
                while len(peers) < ranks - 1:
                    server.settimeout(_left(deadline))
                    peer = server.accept()[0]
                    if _proves(peer, proof):
                        peers.append(peer)
                    else:
                        peer.close()
        else:
            peers.append(socket.create_connection((host, ports[1]), timeout=_left(deadline)))
            peers[0].sendall(proof)
            store = dist.TCPStore(host, ports[0], None, False, timedelta(seconds=_left(deadline)), False)
        store.set_timeout(timedelta(seconds=_left(deadline)))
        expected = f"the other ranks of an engine with engine.tensor_parallel={ranks}"
        seal_objects(shake_hands(store, rank, ranks, secret, f"{host}:{ports[0]}", expected))
    except (OSError, dist.DistError) as error:
        raise EngineError(f"{_missing(settings, len(peers))} ({error})") from error
    line = Lifeline(peers)
    try:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(settings.device)
        backend, limit = "cuda:nccl,cpu:gloo" if on_gpu else "gloo", timedelta(seconds=meeting.limit_s)
        dist.init_process_group(backend, store=store, world_size=ranks, rank=rank, timeout=limit)
        store.set_timeout(IDLE)
        dist.distributed_c10d._set_pg_timeout(IDLE)
    except BaseException:
        line.leave(well=False)
        raise
    return line


class RankWorker(BaseWorker):
    """A worker of an engine, or of one of its ranks. `line`: to the others, None without any."""

    listen = staticmethod(listen)

    def __init__(self, settings: Settings):
        self.line = join(settings) if settings.tensor_parallel > 1 else None
        try:
            self._start(settings)
        except BaseException:
            if self.line is not None:
                self.line.leave(well=False)
            raise
        super().__init__(settings)

    @abstractmethod
    def _start(self, settings: Settings) -> None:
        """Make the engine, in the process group of its ranks."""

    @abstractmethod
    def _end(self) -> None:
        """End the engine."""

    def orphaned(self) -> None:
        if self.line is not None:  # the engine's end would wait for the others, and they may wait for this rank
            self.line.end()
        self.close()

    def close(self) -> None:
        if self.line is not None:
            self.line.leave()
        self._end()
        if dist.is_initialized():  # some versions leave the group to its destructor, which aborts
            dist.destroy_process_group()


def _missing(settings: Settings, came: int) -> str:
    """Return who did not reach whom, and what to do."""
    meeting, rank, ranks = settings.meeting, settings.rank, settings.tensor_parallel
    assert meeting is not None
    others = ", ".join(dict.fromkeys(meeting.hosts[1:]))
    who = f"rank {rank} on {meeting.hosts[rank]} did not reach"
    if rank == 0:
        who = f"{came} of {ranks - 1} other ranks, on {others}, came to"
    return (
        f"{who} port {meeting.ports[1]} of {meeting.hosts[0]} in {meeting.limit_s:g} s, half of "
        f"{meeting.key}.start_timeout_s: expected nodes that connect to each other's ports with "
        f"engine.tensor_parallel={ranks}. Lower it, so that a replica is on one node."
    )


def _left(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError after it."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return seconds


def _proves(peer: socket.socket, proof: bytes) -> bool:
    peer.settimeout(5.0)
    with suppress(OSError):
        return hmac.compare_digest(peer.recv(len(proof), socket.MSG_WAITALL), proof)
    return False
