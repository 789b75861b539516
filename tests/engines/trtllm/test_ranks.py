"""A TensorRT-LLM engine of several ranks over the strict fake: a real child process of each rank."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from aligner.cluster.handshake import session
from aligner.cluster.seal import Seal
from aligner.config.resolve import compose
from aligner.config.validate import validate_engines
from aligner.config.validate_model import check_node
from aligner.engines.child.engine import ChildEngine
from aligner.engines.child.worker import Settings
from aligner.engines.trtllm import ranks as engine_ranks
from aligner.engines.trtllm.torch_backend import TrtllmEngine
from aligner.engines.trtllm.torch_worker import Worker
from aligner.errors import ConfigError, EngineError, LayoutError, RefitError
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.types import SamplingParams
from tests.engines.contract import LLAMA, PROMPTS, check_logprobs, fill, reference, seeds_for
from tests.engines.trtllm.setup import FAKE, ROOT, make_engine
from tests.ranks import on_ranks
from tests.tiny import hf_weights


def of_ranks(body):
    return pytest.mark.slow(pytest.mark.multirank(on_ranks(2)(body)))


@contextmanager
def engine_of_all(folder: Path, node: str = "one", **settings: str):
    """One engine of all ranks, whose children have the fake's `settings`, with `rank1_` those of rank 1 alone. This
    rank seems to be on `node`."""
    rank = dist.get_rank()
    settings = {n.removeprefix("rank1_"): v for n, v in settings.items() if rank or not n.startswith("rank1_")}
    settings |= {"log": str(folder / f"log{rank}")}
    environ = {f"FAKE_TRTLLM_{name.upper()}": value for name, value in settings.items()}
    environ["PYTHONPATH"] = os.pathsep.join([str(FAKE), str(ROOT)])
    on_node = patch("aligner.engines.child.engine.node", lambda: node)
    with patch.dict(os.environ, environ), patch("aligner.engines.trtllm.torch_backend.require_package"), on_node:
        engine = make_engine(LLAMA, tensor_parallel=2, process=True, group=dist.group.WORLD)
        yield engine
        engine.close()


def calls(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / f"log{dist.get_rank()}").read_text().splitlines()]


@of_ranks
def test_ranks_hold_shares_and_generate_together(tmp_path):
    model, other, sampling = reference(LLAMA), reference(LLAMA, 1), SamplingParams(7, top_k=20)
    with engine_of_all(tmp_path) as engine:
        for number, weights in enumerate((model, other)):
            fill(engine, weights, number)  # every rank starts with the prefixes of the one before
            assert dict(engine.checksums()) == {n: tensor_checksum(t) for n, t in hf_weights(weights).items()}
            out = engine.generate(PROMPTS, seeds_for(PROMPTS), sampling)
            check_logprobs(weights, PROMPTS, 1, replace(out, logprobs=out.full_logprobs))
            engine.sleep()
            engine.wake()
        child = engine._channel.child.process
    assert child.poll() == 0  # both end well
    own = [call for call in calls(tmp_path) if call not in ("run", "reload")]
    sweep = ["begin", "modules", "finalize", "modules", "reset_prefix_cache"]
    scores = ["reset_prefix_cache"] * 2 * len(PROMPTS)  # the rows of both ranks
    moves = ["release", "materialize", "reset_prefix_cache"]
    assert own == ["LLM", *2 * [*sweep, *scores, *moves], "shutdown"]


@of_ranks
def test_the_end_of_one_process_ends_all_and_is_told_on_all_ranks(tmp_path):
    with engine_of_all(tmp_path, rank1_crash="run:2") as engine:
        fill(engine, reference(LLAMA))
        assert len(engine.generate([[1]], [[0]], SamplingParams(2)).tokens) == 1
        for _ in range(2):
            with pytest.raises(EngineError, match=r"(?s)ended by signal 6 in generate.*illegal memory access"):
                engine.generate([[1]], [[0]], SamplingParams(2))
        with pytest.raises(RefitError, match="ended by signal 6"):
            engine.begin_update(2)
        how = "ended by signal 6" if dist.get_rank() else "ended with exit code 76"
        assert engine._channel.child.ended() == how


@of_ranks
def test_an_error_of_one_rank_fails_the_update_on_all(tmp_path):
    """Of ranks on two nodes, which meet by the name of the first one's."""
    model = reference(LLAMA)
    with engine_of_all(tmp_path, f"node {dist.get_rank()}", rank1_raise="reload:2") as engine:
        assert not engine._on_one_node
        with pytest.raises(RefitError, match="bucket failed: RuntimeError: out of memory in reload"):
            fill(engine, model)
        with pytest.raises(RefitError, match="no complete weights"):
            engine.generate([[1]], [[0]], SamplingParams(1))
        out = fill(engine, model, 2).generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4))
        check_logprobs(model, PROMPTS, 1, out)
        assert calls(tmp_path).count("abort") == 1


@of_ranks
def test_a_control_action_that_one_rank_stays_out_of_is_refused(tmp_path):
    """By the fake: a package's executors would wait for it."""
    with engine_of_all(tmp_path, action_s="1") as engine:
        engine._ledger.begin(1)
        failed = "begin failed: RuntimeError: not all ranks entered control action 1"
        with pytest.raises(RefitError, match=failed) if dist.get_rank() == 0 else nullcontext():
            if dist.get_rank() == 0:
                engine._channel.call("begin", timeout_s=100, key="", error=RefitError)
        dist.barrier()


@of_ranks
def test_a_start_that_fails_on_one_rank_fails_on_all(tmp_path):
    """At once: the first rank waits in its start for the other, as long as it may."""
    wanted = pytest.raises(EngineError, match="start failed: RuntimeError: out of memory in LLM")
    with wanted, engine_of_all(tmp_path, rank1_raise="LLM"):
        pass


@of_ranks
def test_a_version_whose_ranks_cannot_be_started_one_by_one(tmp_path):
    expected = r"engine.tensor_parallel=2: expected 1 with TensorRT-LLM 1.2.1.*The doctor names what is missing"
    with pytest.raises(ConfigError, match=expected), engine_of_all(tmp_path, version="1.2.1"):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_name_host_port_and_key(rank):
    """A stranger is sent away, and gets them no more time."""
    ports = engine_ranks.listen("127.0.0.1")
    server = engine_ranks._OPEN[1]
    if rank:
        server.close()
    else:
        stranger = socket.create_connection(("127.0.0.1", ports[1]), timeout=100)
        stranger.sendall(bytes(32))
    meeting = "127.0.0.1", *ports, b"secret"
    settings = SimpleNamespace(meeting=meeting, meet_s=0.1, rank=rank, tensor_parallel=2)
    who = "rank 1 did not reach" if rank else "0 of 1 other ranks came to"
    how = rf"{who} port {ports[1]} of 127.0.0.1 in 0.1 s, half of engine.trtllm.start_timeout_s .*tensor_parallel=2"
    with pytest.raises(EngineError, match=how):
        engine_ranks.join(settings)
    assert server.fileno() == -1 and (rank or stranger.recv(1) == b"")
    engine_ranks._OPEN.clear()


def test_replicas_have_one_size_and_share_a_node_only_where_one_reads_the_memory_of_another():
    several = ["stage=grpo", "engine=trtllm", "engine.tensor_parallel=4"]
    check_node(compose(several), range(2), 4)
    with pytest.raises(LayoutError, match=r"engine.tensor_parallel=4: .*trtllm and engine.ranks: ranks 2 to 5 are on"):
        check_node(compose([*several, "engine.ranks=4"]), range(4), 6)
    with pytest.raises(LayoutError, match=r"engine.tensor_parallel=4: expected a divisor of .*6"):
        validate_engines(compose(several), 6)


def test_strangers_get_ranks_no_more_time(monkeypatch):
    ports = engine_ranks.listen("127.0.0.1")
    times = iter(range(10))
    monkeypatch.setattr(engine_ranks, "time", SimpleNamespace(monotonic=lambda: next(times)))
    strangers = [socket.create_connection(("127.0.0.1", ports[1])) for _ in range(4)]
    for stranger in strangers:
        stranger.close()
    settings = SimpleNamespace(meeting=("127.0.0.1", *ports, b"secret"), meet_s=3, rank=0, tensor_parallel=2)
    with pytest.raises(EngineError, match="0 of 1 other ranks came to"):
        engine_ranks.join(settings)
    assert next(times) == 4
    engine_ranks._OPEN.clear()


def test_a_rank_that_fails_after_they_have_met_ends_the_others(monkeypatch):
    ports = engine_ranks.listen("127.0.0.1")
    for name in ("shake_hands", "seal_objects"):
        monkeypatch.setattr(engine_ranks, name, lambda *arguments: None)
    for name in ("_watch_trainer", "_watch"):
        monkeypatch.setattr(engine_ranks.Lifeline, name, lambda *arguments: None)
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=RuntimeError("no group")))
    settings = SimpleNamespace(meeting=("127.0.0.1", *ports, b"secret"), meet_s=100, rank=0, tensor_parallel=2)
    with socket.create_connection(("127.0.0.1", ports[1]), timeout=100) as peer:
        peer.sendall(Seal(b"secret").mac(b"", "line"))
        with pytest.raises(RuntimeError, match="no group"):
            engine_ranks.join(settings)
        assert peer.recv(1) == b""
    engine_ranks._OPEN.clear()


def test_the_secret_of_an_engine_stays_in_its_processes(monkeypatch):
    engine, sent = TrtllmEngine.__new__(TrtllmEngine), []
    engine._group, engine._on_one_node, engine.options = object(), True, SimpleNamespace(start_timeout_s=8.0)
    monkeypatch.setattr(engine, "_of_ranks", lambda value: sent.append(value) or [value])
    monkeypatch.setattr(engine, "_call", lambda *arguments, limit: (1, 2))
    settings = Settings("", [], 53, "float32", 64, 4, 1 << 24, *[False] * 4, 0, False)
    monkeypatch.setattr(ChildEngine, "_settings", lambda engine, memories: settings)
    actual = engine._settings([])
    (nonce,) = (value for value in sent[0] if isinstance(value, bytes))
    assert actual.meeting == ("127.0.0.1", 1, 2, session().mac(nonce, "engine")) and actual.meet_s == 4
    assert actual.meeting[-1] not in sent[0]


WAITS = """
import socket, time
from aligner.engines.trtllm.ranks import Lifeline
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


def test_an_orphan_of_several_ranks_does_not_close_its_engine():
    worker = Worker.__new__(Worker)
    worker.line, worker.llm = Mock(), Mock()
    worker.line.end.side_effect = SystemExit
    with pytest.raises(SystemExit):
        worker.orphaned()
    assert not worker.llm.method_calls and [call[0] for call in worker.line.method_calls] == ["end"]
