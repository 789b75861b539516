"""Between a trainer and its engine's process there is nothing that another process could open."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from aligner.engines.child.buckets import BucketWriter, CudaMemory, MemoryFile
from aligner.engines.child.process import clean_environment, interpreter, spawn
from aligner.errors import EngineError


def sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def table(pid: int, name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]


@pytest.mark.slow
def test_the_connection_has_no_name_and_the_child_listens_nowhere():
    child, connection = spawn("aligner.engines.trtllm.torch_worker:Worker", clean_environment(os.environ, {}))
    try:
        assert isinstance(connection, Connection)
        connection.send(("no such call", ()))
        assert connection.poll(120), child.last_words()  # it serves
        assert connection.recv()[0] == "error"
        theirs = sockets(child.process.pid)
        ours = [row for row in table(child.process.pid, "unix") if row[6] in theirs]
        assert ours and all(len(row) == 7 for row in ours)  # the eighth column is a name
        listening = [row for kind in ("tcp", "tcp6") for row in table(child.process.pid, kind) if row[3] == "0A"]
        assert not [row for row in listening if row[9] in theirs]
        assert stat.S_IMODE(child.log.stat().st_mode) == 0o600
    finally:
        connection.close()
        child.stop(20)
    assert not child.log.exists()


READ = """import pickle, sys
memory = pickle.loads(bytes.fromhex(sys.argv[1]))
print(memory.tensor()[:12].tolist())"""


def read(memory: MemoryFile | CudaMemory) -> str:
    """What another process finds there."""
    command = [sys.executable, "-c", READ, pickle.dumps(memory).hex()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_another_process_reads_what_was_written():
    memory = MemoryFile.create(4096)
    memory.tensor()[:12] = torch.arange(12)
    assert read(memory) == f"{list(range(12))}\n"
    memory.close()
    with pytest.raises(EngineError, match="expected processes of an engine to see each other in /proc"):
        memory.tensor()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_reads_a_cuda_buffer():
    buffer = torch.arange(64, dtype=torch.uint8, device="cuda")
    assert read(CudaMemory.of(buffer)) == f"{list(range(12))}\n"


def test_a_cuda_buffer_is_opened_on_the_childs_first_device(monkeypatch):
    """Torch's own way there and back, but for the four calls that a driver answers: a buffer of the trainer's device 3,
    which is the first that the child sees."""
    asked, shared = [], (b"allocation", 64, 0, b"counter", 0, b"event", True)
    buffer = torch.zeros(64, dtype=torch.uint8)
    storage = buffer.untyped_storage()

    def opened(cls, *arguments):
        asked.append(arguments)
        return storage

    monkeypatch.setattr(reductions, "shared_cache", {})
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "device", torch.device("cuda", 3))
        patch.setattr(torch.UntypedStorage, "_share_cuda_", lambda self: (3, *shared), raising=False)
        memory = CudaMemory.of(buffer)
    reported, reductions.shared_cache = pickle.dumps(memory), {}  # another process has opened nothing yet
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", classmethod(opened), raising=False)
    actual = pickle.loads(reported).tensor()
    assert asked == [(0, *shared)]
    (slots,) = BucketWriter(buffer, {"w": torch.float32}).buckets([("w", torch.arange(6.0).view(2, 3))])
    assert actual.dtype is torch.uint8 and torch.equal(slots[0].view(actual), torch.arange(6.0).view(2, 3))


def test_tensors_that_stay_float32_are_not_rounded_on_their_way():
    buffer, thirds = torch.empty(4096, dtype=torch.uint8), torch.tensor([1 / 3, 2 / 3])
    writer = BucketWriter(buffer, {"half": torch.bfloat16, "whole": torch.float32})
    (slots,) = writer.buckets([("half", thirds), ("whole", thirds)])
    assert torch.equal(slots[0].view(buffer), thirds.bfloat16()) and torch.equal(slots[1].view(buffer), thirds)


def test_weights_on_their_way_have_no_name():
    memory = MemoryFile.create(4096)
    try:
        assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:")
        assert os.fstat(memory.fd).st_nlink == 0
    finally:
        memory.close()


def test_of_a_copy_on_a_node_an_engines_environment_is_the_checkouts(tmp_path, monkeypatch):
    """The copy has none; its code is the engine's too."""
    python = tmp_path / ".venv-engine/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    for name, value in {"ALIGNER_NODE_LOCAL": "/tmp/x", "ALIGNER_ROOT": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    actual, environ = interpreter(".venv-engine/bin/python", {}, "engine.vllm")
    assert actual == str(python) and environ == {"PYTHONPATH": str(Path(__file__).parents[3])}
