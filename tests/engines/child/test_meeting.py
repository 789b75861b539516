"""Processes of an engine's ranks that meet, or do not."""

import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from aligner.cluster.handshake import session
from aligner.cluster.seal import Seal
from aligner.engines.child import ranks
from aligner.engines.child.worker import Meeting
from aligner.engines.vllm.engine import VllmEngine
from aligner.errors import EngineError


def settings_of(ports, limit_s: float, rank: int = 0) -> SimpleNamespace:
    meeting = Meeting(("127.0.0.1", "localhost"), ports, b"secret", limit_s, "engine.vllm")
    return SimpleNamespace(meeting=meeting, rank=rank, tensor_parallel=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_name_host_port_and_key(rank):
    """A stranger is sent away, and gets them no more time."""
    ports = ranks.listen("127.0.0.1")
    server = ranks._OPEN[1]
    if rank:
        server.close()
    else:
        stranger = socket.create_connection(("127.0.0.1", ports[1]), timeout=100)
        stranger.sendall(bytes(32))
    who = "rank 1 on localhost did not reach" if rank else "0 of 1 other ranks, on localhost, came to"
    how = rf"{who} port {ports[1]} of 127.0.0.1 in 0.1 s, half of engine.vllm.start_timeout_s: .*tensor_parallel=2"
    with pytest.raises(EngineError, match=how):
        ranks.join(settings_of(ports, 0.1, rank))
    assert server.fileno() == -1 and (rank or stranger.recv(1) == b"")
    ranks._OPEN.clear()


def test_strangers_get_ranks_no_more_time(monkeypatch):
    ports = ranks.listen("127.0.0.1")
    times = iter(range(10))
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: next(times)))
    strangers = [socket.create_connection(("127.0.0.1", ports[1])) for _ in range(4)]
    for stranger in strangers:
        stranger.close()
    with pytest.raises(EngineError, match="0 of 1 other ranks, on localhost, came to"):
        ranks.join(settings_of(ports, 3))
    assert next(times) == 4
    ranks._OPEN.clear()


def test_a_rank_that_fails_after_they_have_met_ends_the_others(monkeypatch):
    ports = ranks.listen("127.0.0.1")
    for name in ("shake_hands", "seal_objects"):
        monkeypatch.setattr(ranks, name, lambda *arguments: None)
    for name in ("_watch_trainer", "_watch"):
        monkeypatch.setattr(ranks.Lifeline, name, lambda *arguments: None)
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=RuntimeError("no group")))
    with socket.create_connection(("127.0.0.1", ports[1]), timeout=100) as peer:
        peer.sendall(Seal(b"secret").mac(b"", "line"))
        with pytest.raises(RuntimeError, match="no group"):
            ranks.join(settings_of(ports, 100))
        assert peer.recv(1) == b""
    ranks._OPEN.clear()


def test_the_secret_of_an_engine_stays_in_its_processes(monkeypatch):
    engine, sent = VllmEngine.__new__(VllmEngine), []
    engine._group, engine._on_one_node, engine.options = object(), True, SimpleNamespace(start_timeout_s=8.0, KEY="k")
    monkeypatch.setattr(engine, "_of_ranks", lambda value: sent.append(value) or [value])
    monkeypatch.setattr(engine, "_call", lambda *arguments, limit: (1, 2))
    actual = engine._meeting()
    (nonce,) = (value for value in sent[0] if isinstance(value, bytes))
    assert actual == Meeting(("127.0.0.1",), (1, 2), session().mac(nonce, "engine"), 4, "k")
    assert actual.secret not in sent[0]


WAITS = """
import socket, time
from aligner.engines.child.ranks import Lifeline
peers = socket.socketpair()
line = Lifeline(peers[:1])
print("waits", flush=True)
time.sleep(60)
print("survives", flush=True)
"""
TRAINER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"


@pytest.mark.slow
def test_a_rank_that_waits_for_its_peers_ends_with_its_trainer():
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "waits\n"
        trainer.kill()
        assert trainer.stdout.read() == ""
