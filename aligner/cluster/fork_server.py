"""A fork server: a process that has imported what ranks need, and forks them. Imports take time only once, and their
memory is shared.

    launcher ──exec──> fork server: imports, and waits for requests
        ^                 └─fork──> intermediate process, which ends at once
        │                             └─fork──> rank 0, rank 1, ...
        └──────── has adopted them ────────────────┘

The ranks become the launcher's own children, like those that it starts itself: it sees how each ends, and they end with
it. A forked process cannot continue with threads that its parent had, nor with CUDA. If there is a GPU, a library has
started a thread, or an import fails, the fork server starts again without imports, and each rank makes its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from aligner.cluster import threads
from aligner.loading import for_good

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Child:
    """A process that this one has adopted, with the methods of `subprocess.Popen` that are used."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        """Return the exit code. The process is reaped only once its code is known: a signal's handler may run in
        between and do both sooner."""
        try:
            if self.returncode is None and (end := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)):
                self.returncode = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                os.waitpid(self.pid, 0)
        except ChildProcessError:
            if self.returncode is None:
                raise
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # likewise
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A fork server. `imports`: modules. `environ`: their environment. `ignored`: signals that end neither the server,
    nor its children before they listen."""

    def __init__(self, imports: Sequence[str], environ: dict[str, str], ignored: Sequence[int]):
        self._asks, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), json.dumps(list(imports))],
                env=environ,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # like ranks: a Ctrl-C reaches them through the launcher
                preexec_fn=lambda: prepare(ignored),
            )

    def children(self, command: Sequence[str], each: Sequence[tuple[dict[str, str], Path | None]]) -> list[Child]:
        """Start processes that run `command`, a Python's `-m MODULE`, each in its environment, writing to its file or
        to the server's output. Raises EOFError or ConnectionError if the server ends, also if it cannot fork."""
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            self._asks.send((os.getpid(), list(command), [(environ, log and str(log)) for environ, log in each]))
            pids, _adopted = self._asks.recv(), self._asks.recv()
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)  # processes that ranks leave behind are not adopted
        return [Child(pid) for pid in pids]

    def close(self) -> None:
        self._asks.close()
        self.process.kill()
        self.process.wait()


_kept: list[ForkServer] = []


@contextmanager
def kept(*settings: Any) -> Iterator[ForkServer]:
    """Keep one fork server, of these `settings`, for all processes that are started within."""
    _kept.append(ForkServer(*settings))
    try:
        yield _kept[-1]
    finally:
        _kept.pop().close()


@contextmanager
def lent(*settings: Any) -> Iterator[ForkServer]:
    """Yield the fork server that is kept, else one of these `settings`, which ends afterwards."""
    with nullcontext(_kept[-1]) if _kept else kept(*settings) as server:
        yield server


def prepare(ignored: Sequence[int]) -> None:
    """Ask Linux for SIGKILL when the launcher dies, so that killing it leaves no ranks behind: at SIGTERM they would
    first finish their step and save. A request to stop does not end a rank that does not listen yet: it is repeated."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ready(imports: Sequence[str]) -> bool:
    """Import the modules; return whether processes can be forked from here. Errors of imports are raised in the
    ranks."""
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        return False
    threads.reserve()
    try:
        with for_good():
            for name in imports:
                import_module(name)
    except (Exception, SystemExit):
        return False
    return len(os.listdir("/proc/self/task")) == 1 and "libcuda.so" not in Path("/proc/self/maps").read_text()


def _main(asked: Connection, imports: Sequence[str]) -> None:
    """Fork children for requests, until the launcher has ended. In each child it becomes the command."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the launcher repeats it for the ranks
    if imports and not _ready(imports):
        os.execv(sys.executable, [*sys.orig_argv[:-1], "[]"])
    while True:
        try:
            launcher, command, each = asked.recv()
        except EOFError:
            return
        if intermediate := os.fork():
            if os.waitpid(intermediate, 0)[1]:
                sys.exit(1)  # its output has the reason; its children end with the launcher
            asked.send("adopted")
            continue
        intermediate, pids = os.getpid(), []
        for environ, log in each:
            pids.append(os.fork())
            if not pids[-1]:
                asked.close()
                _begin(launcher, intermediate, log)
                _run_command(command, environ)
                return
        asked.send(pids)
        os._exit(0)


def _begin(launcher: int, intermediate: int, log: str | None) -> None:
    """Give this process the properties of one that the launcher has started itself."""
    os.setpgid(0, 0)
    while os.getppid() == intermediate:
        time.sleep(0.001)
    prepare(())
    if os.getppid() != launcher:  # the launcher has died sooner
        os._exit(1)
    if log:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _run_command(command: Sequence[str], environ: dict[str, str]) -> None:
    """Run the command in this process, with the imported modules."""
    os.environ.clear()
    os.environ.update(environ)
    threads.inherited()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # Python's own generator is seeded already
    sys.argv = list(command[2:])
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
