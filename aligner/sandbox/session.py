"""The host's end of a process in a sandbox: starts runs, passes messages on, reads how a run ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.errors import SandboxError

ENVIRON = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
KEPT = ("LD_LIBRARY_PATH",)  # by which a cluster's module of Python may find its libraries
SILENT_S = 900.0  # without a message from a sandbox, which ends its runs far earlier: the machine is stuck


@dataclass(frozen=True)
class RunEnd:
    """The end of a run.

    how: exit, cpu, memory, output, hung, protocol (an invalid answer), stopped. code: the exit code, negative for a
    signal. out: the program's output.
    """

    how: str
    code: int = 0
    out: str = ""


class ProgramSession:
    """Runs of one program, one after another. Raises SandboxError if the sandbox fails."""

    def __init__(
        self, command: Sequence[str], job: dict[str, Any], silent_s: float = SILENT_S, inherited: Sequence[int] = ()
    ):
        self.silent_s = silent_s
        self.running, self._read_ahead = False, bytearray()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRON | {name: os.environ[name] for name in KEPT if name in os.environ},
            cwd="/",
            bufsize=0,
            pass_fds=inherited,
            start_new_session=True,  # a terminal's signals do not reach it
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._send(b"j", json.dumps(job).encode())
        except SandboxError:
            self.close()
            raise

    def start(self, stdin: str = "", serves: bool = False) -> None:
        self._send(b"s", json.dumps({"stdin": stdin, "serves": serves}).encode())
        self.running = True

    def tell(self, message: bytes) -> None:
        self._send(b"m", message)

    def next(self) -> bytes | RunEnd:
        """Return the child's next message, or its end."""
        kind = self._read(1)
        text = self._read(int.from_bytes(self._read(8), "little"))
        if kind == b"m":
            return text
        self.running = False
        return _ended(json.loads(text))

    def stop(self) -> None:
        if self.running:
            self._send(b"x", b"")
        while self.running:
            self.next()

    def kill(self) -> None:
        """End it while another thread waits for it, which then gets an error."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipes, at which the process ends its child and itself, and reap it."""
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()

    def _send(self, kind: bytes, text: bytes) -> None:
        """Send a message. Read the other side's output meanwhile, because a run may end and write."""
        assert self._process.stdin is not None
        data = memoryview(kind + len(text).to_bytes(8, "little") + text)
        try:
            while data:
                if self._ready(select.POLLOUT):
                    data = data[os.write(self._process.stdin.fileno(), data) :]
        except BrokenPipeError:
            raise self._broken() from None

    def _read(self, count: int) -> bytes:
        while len(self._read_ahead) < count:
            self._ready(0)
        data = bytes(self._read_ahead[:count])
        del self._read_ahead[:count]
        return data

    def _ready(self, writes: int) -> bool:
        """Read available output; with `writes`, return whether the pipe can be written."""
        assert self._process.stdin and self._process.stdout
        source, sink = self._process.stdout.fileno(), self._process.stdin.fileno()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        if writes:
            poll.register(sink, writes)
        ready = {fd for fd, _ in poll.poll(1000 * self.silent_s)}
        if not ready:
            self._process.kill()
            raise SandboxError(f"the sandbox sent nothing for {self.silent_s:g} s")
        if source in ready:
            piece = os.read(source, 1 << 20)
            if not piece:
                raise self._broken()
            self._read_ahead += piece
        return sink in ready

    def _broken(self) -> SandboxError:
        assert self._process.stderr is not None
        code = self._process.wait()
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"it was ended from outside ({code})" if code < 0 else f"exit code {code}"
        return SandboxError(f"the sandbox ended before its program: {why}")


def _ended(answer: dict) -> RunEnd:
    if not answer["started"]:
        raise SandboxError(f"a program could not be confined: {answer['problem'] or answer}")
    if answer["how"] == "killed":
        raise SandboxError("a program was killed from outside; is this machine out of memory?")
    return RunEnd(answer["how"], answer["code"], answer["out"])
