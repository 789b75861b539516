"""A pool of gloo rank processes for tests: started once, reused by every test that needs one or more ranks.

    @on_ranks(2)
    def test_both_have_the_weights(tmp_path, parallel): ...     # its body runs on each rank

    results = ranks.run(train, world=2, steps=3)                # for what is compared here: one result per rank

What runs is a function of a module; its keyword arguments and its results travel as pickles. While it runs,
torch.distributed is initialised with exactly `world` ranks. An exception on any rank fails the test with that rank's
traceback; the processes are then replaced, because the other ranks may hang in a collective.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from aligner.cluster.mpi import free_port
from aligner.loading import for_good

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 30.0  # after the first failure: time for the other ranks to tell theirs
COLLECTIVE_TIMEOUT_S = 900.0  # vLLM over two ranks takes minutes to start where others use the cores
SECRET = "5" * 64
POOLS: weakref.WeakSet[Ranks] = weakref.WeakSet()


class RankError(AssertionError):
    """A job failed; the message holds the tracebacks of the ranks that told one, in the order of their arrival."""


def on_ranks(world: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body on each of `world` ranks of the pool; 0: of as many as the test's argument `world` says. Its
    arguments (of fixtures and parameters) must be picklable."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        assert world or "world" in parameters, body

        @functools.wraps(body)
        def test(ranks: Ranks, **arguments: Any) -> None:
            ranks.call(test, world or arguments["world"], arguments)

        asked = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([*parameters.values(), asked])
        test.body = body  # what a rank runs in place of the test
        return test

    return decorate


class Ranks:
    """One process imports everything, which takes seconds, and forks the ranks, again where they were replaced.
    `first`: a module whose `install` it calls before."""

    def __init__(self, size: int = 4, first: str = "") -> None:
        self.size, self.first = size, first
        self._process: subprocess.Popen | None = None
        self._leader = 0
        POOLS.add(self)

    def _import(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        self._asks, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.ranks", str(theirs.fileno()), self.first],
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if not self._asks.recv(1):
                log.seek(0)
                raise RankError(f"the ranks do not start:\n{log.read().decode(errors='replace')[-4000:]}")

    def _start(self) -> None:
        if self._process is None:
            self._import()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the ranks)
        pairs = [Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pairs]
        socket.send_fds(self._asks, [b"x"], [self._log.fileno(), *(theirs.fileno() for _, theirs in pairs)])
        self._leader = int.from_bytes(self._asks.recv(4))
        for _, theirs in pairs:
            theirs.close()

    def run(
        self,
        target: str | Callable[..., Any],
        world: int = 1,
        timeout_s: float = 1200.0,
        lost: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """`target` (a function of a module, or "module:function") with `kwargs` on `world` ranks; their results, by
        rank. The processes of the ranks `lost` end or hang: nobody waits for them, and all are replaced."""
        return self.call(target, world, kwargs, timeout_s, lost)

    def call(
        self,
        target: str | Callable[..., Any],
        world: int,
        arguments: dict[str, Any],
        timeout_s: float = 1200.0,
        lost: Collection[int] = (),
    ) -> list[Any]:
        """As `run`, of a function whose `arguments` may have the names of run's own."""
        assert 1 <= world <= self.size, world
        if not isinstance(target, str):
            assert "." not in target.__qualname__, f"{target.__qualname__} is no function of a module"
            target = f"{target.__module__}:{target.__qualname__}"
        if not self._leader:
            self._start()
        pipes, port = self._pipes[:world], _free_port()
        done = False
        try:
            for rank, pipe in enumerate(pipes):
                pipe.send_bytes(pickle.dumps((target, rank, world, port, arguments)))
            results = self._collect(pipes, time.monotonic() + timeout_s, lost)
            for pipe in pipes if not lost else ():
                pipe.send_bytes(b"release")  # nobody leaves the process group before all are done with it
            done = not lost
            return results
        finally:
            if not done:
                self.end()

    def _collect(self, pipes: list[Connection], deadline: float, lost: Collection[int]) -> list[Any]:
        import torch

        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in lost}
        results: dict[int, Any] = dict.fromkeys(lost)
        failures: list[str] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                failures = [f"ranks {sorted(waiting.values())} did not finish:\n{self._output()}"]
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                except (EOFError, ConnectionError):
                    ok, value = False, f"the process ended:\n{self._output()}"
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise RankError("\n".join(failures))
        return [results[rank] for rank in range(len(pipes))]

    def _output(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")[-4000:]

    def end(self) -> None:
        """End the ranks. The process that forks them stays, and does so again for the next job."""
        if not self._leader:
            return
        os.killpg(self._leader, signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()
        self._log.close()
        self._leader = 0

    def close(self) -> None:
        self.end()
        if self._process is not None:
            self._asks.close()
            self._process.wait()
            self._process = None


def _pack(answer: tuple[bool, Any]) -> bytes:
    """With torch.save: a plain pickle of a tensor names functions of Megatron's, which the tests would then import."""
    import torch

    buffer = io.BytesIO()
    torch.save(answer, buffer)
    return buffer.getvalue()


def _free_port() -> int:
    """Below the ephemeral range, so that no outgoing connection takes it before rank 0 listens, and for each worker
    of xdist from a range of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    return free_port(10000 + 1500 * (worker % 4) + random.SystemRandom().randrange(1500))


def _wait_for_listener(port: int) -> None:
    """Who comes before rank 0 listens is refused, and torch then waits for up to a second before it asks again."""
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.002)


def _serve(pipe: Connection) -> None:
    """A rank's life: jobs until the pipe closes."""
    from aligner.cluster.env import RankEnv
    from aligner.megatron import groups

    while True:
        loaded = len(sys.modules)
        try:
            target, rank, world, port, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if rank:
            _wait_for_listener(port)
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
            os.environ.pop(name, None)
            if world > 1:
                os.environ[name] = value
        try:
            env = RankEnv(rank, 0, world, master_port=port, one_host=True)
            os.environ["ALIGNER_SECRET"] = SECRET
            groups.init_distributed(env, "auto", COLLECTIVE_TIMEOUT_S, Path("ranks"))
            module, name = target.split(":")
            function = getattr(importlib.import_module(module), name)
            answer = _pack((True, getattr(function, "body", function)(**kwargs)))
        except BaseException:  # some of torch's errors are no Exception
            answer = _pack((False, traceback.format_exc()))
        pipe.send_bytes(answer)
        try:
            pipe.recv_bytes()
        except EOFError:
            return
        groups.leave_distributed()
        if len(sys.modules) > loaded:  # what they have made stays: each collection would look through it again
            gc.freeze()  # not after every job, whose last model would stay too, with the threads of its groups


def _explain_assertions() -> None:
    """Of modules of tests that are imported from now on, as pytest does it: a failure shows what was compared."""
    from _pytest.assertion import install_importhook
    from _pytest.config import _prepareconfig

    install_importhook(_prepareconfig(["--noconftest", str(ROOT / "tests")]))


def _main(asked: socket.socket, first: str) -> None:
    """Ranks on pipes that come through this socket, one generation after the other, until it closes."""
    if first:
        importlib.import_module(first).install()
    with for_good():  # else the collection after each job, and that at the end of each run, would look at all modules
        import torch

        import tests.run.jobs  # noqa: F401 (whole stages: nearly all of the package)
        from tests.stages import settle
    settle()
    _explain_assertions()
    torch.set_num_threads(1)
    asked.sendall(b"x")
    leader = 0
    while (request := socket.recv_fds(asked, 1, 64))[0]:
        if leader:
            os.waitpid(leader, 0)  # not sooner: until its group is ended, no other may get its number
        log, *numbers = request[1]
        leader = os.fork()
        os.setpgid(leader, leader)  # by both, so that it is done before either goes on
        if leader == 0:
            asked.close()
            _lead(log, numbers)
            os._exit(0)
        for number in (log, *numbers):
            os.close(number)
        asked.sendall(leader.to_bytes(4))


def _lead(log: int, numbers: list[int]) -> None:
    """Forks the ranks into this process's group, which can be ended as one."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    for own in numbers:
        if os.fork() == 0:
            for other in numbers:
                if other != own:
                    os.close(other)
            _serve(Connection(own))
            os._exit(0)
    for number in numbers:
        os.close(number)
    for _ in numbers:
        os.wait()


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    os._exit(0)
