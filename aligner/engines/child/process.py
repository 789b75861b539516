"""A child process with a clean environment, and calls to it that end: with an answer, an error or a time-out."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from aligner.cluster.env import checkout
from aligner.errors import AlignerError, ConfigError, EngineError, RefitError

# A child that inherits these believes it is a rank of the job: MPI_Init would join it, or hang.
LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMI2_", "PMIX_", "PRTE_", "OPAL_", "MPI_", "MPICH_", "I_MPI_", "HYDRA_", "HYDI_")
LAUNCHER_PREFIXES += ("SLURM_", "SBATCH_", "SRUN_", "MV2_", "PALS_", "ALPS_", "TORCHELASTIC_", "ALIGNER_", "FLUX_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_NAMES += ("ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK")
_LAST_WORDS = 2000  # characters of the child's output in an error
PEER_ENDED = 76  # exit code of a child whose engine lost the child of another rank
END_S = 60.0  # for a process to end after it has closed its connection, or was asked to; a busy machine is slow


def clean_environment(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the launcher's variables, with `extra`."""
    kept = {k: v for k, v in environ.items() if not k.startswith(LAUNCHER_PREFIXES) and k not in LAUNCHER_NAMES}
    return kept | dict(extra)


def interpreter(python: str, environ: Mapping[str, str], section: str) -> tuple[str, dict[str, str]]:
    """Return the executable and its environment. An empty `python` is this Python. Another one (a relative path may
    also start at the checkout's root) finds this package and no other of ours. Raises ConfigError of the engine's
    section."""
    if not python:
        return sys.executable, dict(environ)
    root = Path(__file__).resolve().parents[3]
    executable = shutil.which(python) or shutil.which(checkout() / python)
    if executable is None:
        hint = "launchers/engine_env.sh vllm makes one for engine=vllm."
        raise ConfigError(f"{section}.python", python, "the path of a Python interpreter", hint)
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in environ.items() if name not in own}
    return str(executable), kept | {"PYTHONPATH": str(root)}


class ChildEnd(Protocol):
    """The other end of a `ChildChannel`."""

    def ended(self) -> str:
        """Return how it ended, or "" while it runs."""
        ...

    def last_words(self) -> str: ...

    def stop(self, wait_s: float) -> None: ...


@dataclass
class ChildProcess:
    process: subprocess.Popen
    log: Path

    def ended(self) -> str:
        code = self.process.poll()
        if code is None:
            return ""
        return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def last_words(self) -> str:
        try:
            return self.log.read_text(errors="replace")[-_LAST_WORDS:].strip()
        except OSError as error:
            return f"(its output cannot be read: {error})"

    def stop(self, wait_s: float) -> None:
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.unlink(missing_ok=True)


def spawn(
    worker: str, environ: Mapping[str, str], python: str = "", section: str = ""
) -> tuple[ChildProcess, Connection]:
    """Start a process that serves `worker` (module:class; `python`: see `interpreter`); return it and this end of
    the connection. Its output goes to a temporary file."""
    executable, environ = interpreter(python, environ, section)
    ours, theirs = socket.socketpair()
    handle, log = tempfile.mkstemp(prefix="aligner-engine-", suffix=".log")
    try:
        process = subprocess.Popen(
            [executable, "-m", "aligner.engines.child.serve", str(theirs.fileno()), worker],
            env=environ,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is the trainer's to handle; the child sees its connection close
        )
    finally:
        os.close(handle)
        theirs.close()
    return ChildProcess(process, Path(log)), Connection(ours.detach())


class ChildChannel:
    """Calls to a child: `name(*arguments)` there, one at a time."""

    def __init__(self, child: ChildEnd, connection: Connection, title: str):
        self.child, self.connection, self.title = child, connection, title
        self.broken = ""  # why no call can be answered any more

    def call(
        self,
        name: str,
        *arguments: Any,
        timeout_s: float,
        key: str,
        error: type[EngineError] | type[RefitError] = EngineError,
        progress: Callable[[int], None] | None = None,
    ) -> Any:
        """Call `name(*arguments)` in the child. Raises `error` when the child is gone or does not answer within
        `timeout_s` (config key `key`), else the child's own error."""
        if self.broken:
            raise error(self.broken)
        try:
            self.connection.send((name, arguments))
            return self._answer(name, timeout_s, key, error, progress)
        except (EOFError, OSError):
            raise error(self.gone(name)) from None

    def _answer(self, name, timeout_s, key, error, progress) -> Any:
        deadline, interruption = time.monotonic() + timeout_s, None
        while True:
            if not self.connection.poll(max(0.0, min(1.0, deadline - time.monotonic()))):
                if self.child.ended():
                    raise EOFError
                if time.monotonic() >= deadline:
                    raise error(self._late(name, timeout_s, key))
                continue
            kind, value = self.connection.recv()
            if kind == "progress":
                if progress is None or interruption is not None:
                    continue
                try:
                    progress(value)
                except BaseException as cause:  # a stop of the run, raised once the child has cancelled its requests
                    interruption = cause
                    self.connection.send(("abort", ()))
                continue
            if interruption is not None:
                raise interruption
            if kind == "error":
                raise self._failed(name, value, error)
            return value

    def _failed(self, name: str, cause: AlignerError, error: type[AlignerError]) -> AlignerError:
        """Return the child's error as it is raised here."""
        if isinstance(cause, ConfigError):
            return cause
        kind = type(cause) if isinstance(cause, EngineError | RefitError) else error
        return kind(f"{self.title}: {name} failed: {cause}")

    def gone(self, name: str) -> str:
        """Wait for the end of a child that is ending; return how it ended in `name`."""
        deadline = time.monotonic() + END_S
        while not (how := self.child.ended()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.broken = f"{self.title}: its process {how or 'closed its connection'} in {name}. {self._words()}"
        return self.broken

    def _late(self, name: str, timeout_s: float, key: str) -> str:
        self.broken = f"{self.title}: {name} has not ended after {key}={timeout_s:g} s; it was stopped. {self._words()}"
        self.connection.close()
        self.child.stop(0)
        return self.broken

    def _words(self) -> str:
        return f"Its last output:\n{self.child.last_words() or '(none)'}"

    def close(self) -> None:
        """Ask the child to end, then end it."""
        if not self.broken:
            self.broken = f"{self.title} was closed"
            with contextlib.suppress(OSError):
                self.connection.send(("close", ()))
        self.connection.close()
        self.child.stop(END_S)
