"""One rank of a TensorRT-LLM engine of several, in a process of its own. It meets the others through torch.distributed
by itself: TensorRT-LLM would start its ranks by MPI or Ray.

  listen           the first rank opens two ports
  join             all ranks: connections by which a process learns that another one has ended; then the process group
  executor_class   of an executor of this rank alone, for `LLM(executor_cls=...)`
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from aligner.cluster.handshake import LOOPBACK, seal_objects, shake_hands
from aligner.cluster.seal import Seal
from aligner.config.sections.trtllm import TrtllmConfig
from aligner.engines.child.process import PEER_ENDED
from aligner.engines.child.worker import Settings
from aligner.errors import EngineError

# while the trainer trains, a rank waits in a collective for the first one's next request
IDLE = timedelta(days=30)
_OPEN: list[Any] = []  # of the first rank: the store, and the socket that listens


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
    assert settings.meeting is not None
    host, *ports, secret = settings.meeting
    rank, ranks, deadline = settings.rank, settings.tensor_parallel, time.monotonic() + settings.meet_s
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
        what = f"{len(peers)} of {ranks - 1} other ranks came to" if rank == 0 else f"rank {rank} did not reach"
        raise EngineError(
            f"{what} port {ports[1]} of {host} in {settings.meet_s:g} s, half of {TrtllmConfig.KEY}.start_timeout_s "
            f"({error}): expected nodes that connect to each other's ports with engine.tensor_parallel={ranks}. Lower "
            "it, so that a replica is on one node."
        ) from error
    line = Lifeline(peers)
    try:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(settings.device)
        backend, limit = "cuda:nccl,cpu:gloo" if on_gpu else "gloo", timedelta(seconds=settings.meet_s)
        dist.init_process_group(backend, store=store, world_size=ranks, rank=rank, timeout=limit)
        store.set_timeout(IDLE)
        dist.distributed_c10d._set_pg_timeout(IDLE)
    except BaseException:
        line.leave(well=False)
        raise
    return line


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


def _gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def executor_class() -> type:
    """Return the class of the executor of one rank, which is in a process group."""
    from tensorrt_llm._torch.distributed.communicator import TorchDist
    from tensorrt_llm.executor.worker import GenerationExecutorWorker

    def cluster_info(self: Any) -> list[tuple[str, int]]:
        """Return each rank's node and device, which otherwise Ray tells."""
        if self.cluster_info is None:
            self.cluster_info = _gathered((socket.gethostname(), _device()))
        return self.cluster_info

    TorchDist._get_cluster_info = cluster_info

    class RankExecutor(GenerationExecutorWorker):
        @classmethod
        def create(cls, engine: Any, **arguments: Any) -> Any:
            kept = ("hf_model_dir", "tokenizer", "llm_args", "is_llm_executor")
            return cls(engine=engine, **{name: arguments[name] for name in kept})

        def setup_engine(self) -> None:
            self.global_rank = dist.get_rank()  # without MPI it is 0 on each
            dist.barrier()
            super().setup_engine()

        def _get_comm_ranks_device_id(self) -> tuple[list[int], list[int]]:
            return _gathered(dist.get_rank()), _gathered(_device())

    return RankExecutor
