"""Programs that a model wrote, run where they can do no harm.

    Sandbox -> tier's command (namespaces) -> inside.py -> a child for each test, confined (confine.py) -> the program

A tier is what stands around the child. The child's own limits, Landlock where the kernel has it, and the table of
system calls are the same in all of them, so that what a program may do, and its score, does not depend on the tier.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.config.checks import at_least, one_of
from aligner.errors import ConfigError, SandboxError
from aligner.rewards.sandbox.confine import landlock_version

TIERS = ("bubblewrap", "unshare", "landlock")  # the best first
INSIDE = Path(__file__).with_name("inside.py")
WALL_S = 900.0  # of a program with all its tests: far beyond its limits, for a machine that stands still
FORMS = {
    "bubblewrap": "bwrap (Debian, Ubuntu, Fedora: package `bubblewrap`) and user namespaces",
    "unshare": "unshare (package `util-linux`), user namespaces and Landlock (Linux 5.13)",
    "landlock": "Landlock (Linux 5.13, in the kernel's `lsm=` list)",
}


@dataclass(frozen=True)
class Given:
    """What one run of a program is given. check: {}: nothing; {"code": asserts}; {"call": function, "args": [...]}."""

    stdin: str = ""
    check: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """how: exit, wrong (an assertion), cpu, memory, output, hung. code: the exit code, negative for a signal.
    said: JSON of what the call returned, empty for asserts; None: the check was not reached, or raised."""

    how: str
    code: int
    out: str
    said: str | None


class Sandbox:
    """tier: `auto` takes the best that this machine has, `unsafe` none at all: limits alone. Raises ConfigError where
    there is none, or not the one named."""

    def __init__(self, tier: str = "auto", cpu_s: int = 4, memory_mb: int = 1024, output_mb: int = 8):
        one_of("tier", tier, ("auto", *TIERS, "unsafe"))
        for name, value, low in (("cpu_s", cpu_s, 1), ("memory_mb", memory_mb, 64), ("output_mb", output_mb, 1)):
            at_least(name, value, low)
            if not isinstance(value, int):
                raise ConfigError(name, value, "a whole number")
        self.limits = {"cpu_s": cpu_s, "memory_bytes": memory_mb << 20, "output_bytes": output_mb << 20}
        missing = {}
        for self.tier in (tier,) if tier != "auto" else TIERS:
            lacks = self._lacks()
            if lacks is None:
                return
            missing[self.tier] = f"{self.tier} needs {FORMS[self.tier]}, but {lacks}"
        hint = "`python -m aligner doctor sandbox` shows what there is; tier `unsafe` runs programs without a sandbox."
        raise ConfigError("tier", tier, "a sandbox that this machine has", f"{'; '.join(missing.values())}. {hint}")

    def run(self, program: str, tests: Sequence[Given], wall_s: float = WALL_S) -> Iterator[Ended]:
        """One after another; nothing of it is left when the iterator is at its end, or closed. Raises SandboxError
        where the sandbox itself fails, or the machine stands still for `wall_s`: that says nothing of the program."""
        job = {
            **self.limits,
            "program": program,
            "readable": _readable(),
            "landlock": self.tier != "unsafe" and landlock_version() > 0,
            "seccomp": self.tier != "unsafe",
        }
        process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            start_new_session=True,  # a group of its own, to be killed as a whole
        )
        late = threading.Timer(wall_s, lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        late.start()
        try:
            _send(process, job)
            for test in tests:
                word = secrets.token_hex(16)  # a program that has not read it cannot say that its test has passed
                _send(process, {"stdin": test.stdin, "check": test.check and {**test.check, "word": word}})
                yield _ended(_receive(process), word)
        finally:
            with process:  # closes the pipes, at which `inside.py` ends its child and itself, and reaps it
                process.communicate()
            late.cancel()
            late.join()

    def _lacks(self) -> str | None:
        """Why this tier does not work here, found by using it."""
        program = {"bubblewrap": "bwrap", "unshare": "unshare"}.get(self.tier)
        if program and shutil.which(program) is None:
            return f"there is no `{program}` in PATH"
        if self.tier in ("unshare", "landlock") and not landlock_version():
            return "the kernel has no Landlock"
        try:
            (found,) = self.run("print(6 * 7)", [Given()], wall_s=60.0)
        except SandboxError as error:
            return str(error)
        return None if (found.how, found.out) == ("exit", "42\n") else f"a first program ended with {found}"

    def _command(self) -> list[str]:
        python = [os.path.realpath(sys._base_executable), "-s", "-S", str(INSIDE)]  # the standard library alone
        if self.tier == "unshare":  # no user is mapped, so that exec drops the rights in the namespace
            return ["unshare", "--user", "--net", "--pid", "--ipc", "--fork", "--kill-child", *python]
        if self.tier != "bubblewrap":
            return python
        binds = [text for path in _readable() for text in ("--ro-bind", path, path)]
        apart = ["--unshare-user", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        device = ["--dev-bind", "/dev/null", "/dev/null"]
        return ["bwrap", *apart, *binds, *device, "--remount-ro", "/", "--", *python]


def _readable() -> list[str]:
    """What a program may read: Python's installation and the system's libraries, and `inside.py` with its neighbour."""
    python = {sys.base_prefix, os.path.realpath(sys.base_prefix)}
    system = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")
    return [path for path in (*system, *sorted(python), str(INSIDE.parent)) if os.path.exists(path)]


def _send(process: subprocess.Popen, message: dict) -> None:
    assert process.stdin is not None
    data = json.dumps(message).encode()
    try:
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
    except BrokenPipeError:
        raise _broken(process) from None


def _receive(process: subprocess.Popen) -> dict:
    assert process.stdout is not None
    head = process.stdout.read(8)
    data = process.stdout.read(int.from_bytes(head, "little"))
    if len(head) < 8 or len(data) < int.from_bytes(head, "little"):
        raise _broken(process)
    return json.loads(data)


def _broken(process: subprocess.Popen) -> SandboxError:
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    code = process.wait()
    why = lines[-1] if lines else f"it was ended from outside ({code})" if code < 0 else f"exit code {code}"
    return SandboxError(f"the sandbox ended before its program: {why}")


def _ended(answer: dict, word: str) -> Ended:
    said = answer["said"]
    if not said.startswith("+"):
        raise SandboxError(f"a program could not be confined: {said[1:] or answer}")
    if answer["ended"] == "killed":
        raise SandboxError("somebody outside killed a program; out of memory on this machine?")
    found = said[1:].removeprefix(word) if said[1:].startswith(word) else None
    return Ended(answer["ended"], answer["code"], answer["out"], found)
