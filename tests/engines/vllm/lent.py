"""A process that imports vLLM once, and forks each process of an engine. `fork` takes the place of
`aligner.engines.child.process.spawn`.

    python -m tests.engines.vllm.lent DESCRIPTOR
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from aligner.engines.child.process import ChildProcess


class Forked:
    """A process of the server, as `subprocess.Popen` shows one; `asked` tells its number, then its exit code."""

    def __init__(self, asked: socket.socket):
        self.asked, self.pid, self.code = asked, int.from_bytes(asked.recv(4)), None
        assert self.pid, "the server has ended"

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            if not select.select([self.asked], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            self.code = int.from_bytes(self.asked.recv(4), signed=True)
        return self.code

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork(
    path: str, worker: str, environ: Mapping[str, str], python: str = "", section: str = ""
) -> tuple[ChildProcess, Connection]:
    """As `spawn`, by the server at `path`, whose Python it has."""
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(path)
    ours, theirs = socket.socketpair()
    handle, log = tempfile.mkstemp(prefix="aligner-engine-", suffix=".log")
    socket.send_fds(asked, [json.dumps([worker, dict(environ)]).encode()], [theirs.fileno(), handle])
    process = Forked(asked)
    theirs.close()
    os.close(handle)
    return ChildProcess(process, Path(log)), Connection(ours.detach())


def _serve(listener: socket.socket) -> None:
    from aligner.engines.child.serve import serve
    from aligner.engines.vllm.worker import VllmWorker, import_vllm

    # vLLM calls it where an engine ends, and then looks for garbage several times through all that was ever imported,
    # which `import_vllm` and vLLM itself had taken out of it: most of the time in which another engine takes its place
    gc.unfreeze = lambda: None
    import_vllm()
    from vllm.platforms import current_platform

    # another engine looks for kernels in all modules, and fails at one that vLLM's prompt lookup imports
    current_platform.register_triton_kernel_overrides = cache(current_platform.register_triton_kernel_overrides)

    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, 0], [], [], 0.05 if children else None)
        if 0 in ready:  # closed: who started it is gone
            return
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with children.pop(ended[0]) as asked:
                asked.send(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, signed=True))
        if not ready:
            continue
        asked, _ = listener.accept()
        message, numbers, *_ = socket.recv_fds(asked, 1 << 20, 2)
        worker, environ = json.loads(message)
        assert worker == f"{VllmWorker.__module__}:{VllmWorker.__name__}", worker
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for other in (listener, asked, *children.values()):
                other.close()
            os.environ.update(environ)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (1, 2):
                os.dup2(numbers[1], number)
            for name in environ.get("IN_TORCH", "").split():
                getattr(import_module("tests.engines.vllm.stand_ins"), name)()
            serve(Connection(numbers[0]), VllmWorker)
            os._exit(0)
        for number in numbers:
            os.close(number)
        asked.send(pid.to_bytes(4))
        children[pid] = asked


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
