"""Between a trainer and its engine's process there is nothing that another process could open."""

from __future__ import annotations

import os
import stat
from multiprocessing.connection import Connection
from pathlib import Path

from aligner.engines.child.buckets import MemoryFile
from aligner.engines.child.process import clean_environment, spawn


def sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def table(pid: int, name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]


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


def test_weights_on_their_way_have_no_name():
    memory = MemoryFile.create(4096)
    try:
        assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:")
        assert os.fstat(memory.fd).st_nlink == 0
    finally:
        memory.close()
