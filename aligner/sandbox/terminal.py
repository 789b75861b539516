"""A sandbox for an agent at work: a shell, a Python and files of its own, over an image that stays as it is.

    TerminalSandbox -> unshare (namespaces) -> first_process.py -> shells, confined (shells.py, confine.py)

Processes of the agent see an image with their changes (root.py), no network but their own, and no process but theirs.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aligner.config.checks import at_least
from aligner.errors import SandboxError
from aligner.foreign import parse_json
from aligner.sandbox.refusals import explained, kernel
from aligner.sandbox.run import readable_paths
from aligner.sandbox.session import SILENT_S, ProgramSession

FIRST = Path(__file__).with_name("first_process.py")
NAMESPACES = ("--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
NEEDS = "unshare (package `util-linux`), user namespaces with overlayfs, and Linux 5.14"
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
OWN_S = 60.0  # CPU seconds of a request of ours


@dataclass(frozen=True)
class TerminalLimits:
    memory_mb: int = 1024
    cpu_s: float = 10.0  # of a call, by all processes
    waits_s: float = 30.0  # of a call, without computing
    processes: int = 64
    disk_mb: int = 256
    output_chars: int = 8000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            at_least(name, value, 0.1 if name in ("cpu_s", "waits_s") else 1)


class TerminalSandbox:
    """A sandbox of one trajectory. Raises SandboxError if it fails, which is no fault of the agent.

    `ports`: of its loopback, at which this process answers by `listeners`, sockets that were made there. `environ`:
    further variables of its programs. `readable`: further paths of this machine, which programs see until `renew`.
    """

    def __init__(
        self,
        limits: TerminalLimits,
        image: str = "",
        folder: str = "/app",
        ports: Sequence[int] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
        readable: Sequence[str] = (),
    ):
        self.limits, self.folder, self.listeners = limits, folder, []
        program = shutil.which("unshare")
        if program is None:
            raise SandboxError(f"a terminal needs {NEEDS}: there is no `unshare` in PATH")
        paths = [] if image else _machine_paths()
        bin_ = os.path.join(os.path.realpath(sys.base_prefix), "bin")
        self.environ = {
            **{"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "TERM": "dumb"},
            **{"PATH": ":".join((*PATH, *([bin_] if not image and bin_ not in PATH else []))), "LANG": "C.UTF-8"},
            **{"TZ": "UTC", "PYTHONHASHSEED": "0", "PS1": "", "PS2": "", "OMP_NUM_THREADS": "1", "PAGER": "cat"},
            **environ,
        }
        job = {
            "image": image,
            "paths": paths,
            "folder": folder,
            "environ": self.environ,
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
            "processes": limits.processes,
            "output_bytes": limits.output_chars,
            "ports": list(ports),
            "readable": list(readable),
        }
        python = [os.path.realpath(sys._base_executable), "-s", "-S", str(FIRST)]
        try:
            self._start([program, *NAMESPACES, *python], job)
        except SandboxError as error:
            raise SandboxError(f"a terminal needs {NEEDS}: {explained(str(error))}") from None

    def _start(self, command: Sequence[str], job: dict[str, Any]) -> None:
        bridge, theirs = socket.socketpair()
        with bridge, theirs:
            self._session = ProgramSession(command, job | {"bridge": theirs.fileno()}, inherited=[theirs.fileno()])
            try:
                self._session.next()
                _, fds, _, _ = socket.recv_fds(bridge, 1, len(job["ports"]))
                self.listeners = [socket.socket(fileno=fd) for fd in fds]
            except SandboxError:
                self.close()
                raise

    def bash(self, text: str, **limits: float) -> dict[str, Any]:
        """Run lines in the shell. limits: cpu_s and waits_s, if they are others than the sandbox's."""
        return self._ask(do="bash", text=text, **limits)

    def python(self, text: str) -> dict[str, Any]:
        return self._ask(do="python", text=text)

    def edit(self, path: str, old: str, new: str) -> dict[str, Any]:
        return self._ask(do="edit", arguments={"path": path, "old": old, "new": new})

    def write(self, files: Mapping[str, str | bytes], folder: str = "") -> dict[str, Any]:
        """Write files, by names relative to the folder: that of the shell, if none is named."""
        data = {
            name: text if isinstance(text, bytes) else text.encode(errors="replace") for name, text in files.items()
        }
        texts = {name: base64.b64encode(each).decode() for name, each in data.items()}
        return self._ask(do="write", arguments={"files": texts}, folder=folder)

    def read(self, path: str) -> str | None:
        """Return a file's first bytes as text; None if there is none."""
        answer = self._ask(do="read", arguments={"path": path})
        return None if answer["status"] else answer["out"]

    def renew(self) -> None:
        """End all processes, and take the system's folders from the image again. Files of other folders stay."""
        self._ask(do="renew")

    def run(
        self, command: Sequence[str], cpu_s: float, environ: Mapping[str, str], waits_s: float = 0.0
    ) -> dict[str, Any]:
        """Run a program to its end. waits_s: 0 for as much as cpu_s."""
        ask = {"do": "run", "command": list(command), "environ": self.environ | dict(environ), "folder": self.folder}
        return self._ask(**ask, cpu_s=cpu_s, waits_s=waits_s or cpu_s)

    def kill(self) -> None:
        """End it while another thread runs a program in it, which then gets an error."""
        self._session.kill()

    def close(self) -> None:
        """End it; nothing of it is left."""
        for listener in self.listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        self._session.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        """Return {out, status, why}."""
        own = request["do"] not in ("bash", "python", "run")
        limits = {"cpu_s": OWN_S, "waits_s": OWN_S} if own else asdict(self.limits)
        self._session.silent_s = SILENT_S + {**limits, **request}["waits_s"]
        self._session.tell(json.dumps({**limits, **request}).encode())
        answer = self._session.next()
        assert isinstance(answer, bytes)
        return parse_json(answer, "an answer of a terminal", SandboxError)


def _machine_paths() -> list[str]:
    """Return the parts of this machine that an agent sees if there is no image."""
    own = {str(FIRST.parent), os.path.realpath(FIRST.parent)}
    paths = [*readable_paths(), "/bin", "/sbin", "/etc/alternatives", "/etc/ssl"]
    return [path for path in paths if os.path.exists(path) and path not in own]


def lacks() -> str | None:
    """Return why there are no terminals on this machine; None if there are."""
    if os.getuid() == 0 and kernel() < (6, 14) and _forks_freely():
        release = os.uname().release
        return f"root's terminals need Linux 6.14, which bounds their processes; this is {release}. Use another user"
    try:
        sandbox = TerminalSandbox(TerminalLimits())
    except SandboxError as error:
        return str(error)
    try:
        answer = sandbox.bash("echo $((6 * 7))")
        return None if answer["out"] == "42\n" else f"a first command ended with {answer}"
    finally:
        sandbox.close()


def _forks_freely() -> bool:
    """Return whether RLIMIT_NPROC does not hold: for root, unless a container made an ordinary user its root."""
    command = ["prlimit", "--nproc=1:1", "sh", "-c", ": | :"]
    return subprocess.run(command, capture_output=True).returncode == 0
