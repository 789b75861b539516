"""A sandbox for programs that a model wrote.

    Sandbox -> tier's command (namespaces) -> runner.py -> a child for each test, confined (confine.py) -> the program
            -> a second sandbox, for tests that are asserts or calls -> a child for each test -> verdicts.py

A tier is the isolation around the child. The child's own limits, Landlock if the kernel has it, and the table of system
calls are the same in all tiers. So a program's permissions and its score do not depend on the tier.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from aligner.config.checks import at_least, one_of
from aligner.errors import ConfigError, SandboxError
from aligner.sandbox.confine import landlock_version
from aligner.sandbox.refusals import explained
from aligner.sandbox.session import SILENT_S, ProgramSession, RunEnd

TIERS = ("bubblewrap", "unshare", "landlock")  # best first
RUNNER = Path(__file__).with_name("runner.py")
TESTS = 20  # limit of all tests of a program / limit of one test
JUDGE_BYTES = 1 << 30  # of memory, for a row's tests and the results that they read
FORMS = {
    "bubblewrap": "bwrap (Debian, Ubuntu, Fedora: package `bubblewrap`) and user namespaces",
    "unshare": "unshare (package `util-linux`), user namespaces and Landlock (Linux 5.13)",
    "landlock": "Landlock (Linux 5.13, in the kernel's `lsm=` list)",
}


class Sandbox:
    """A sandbox of a tier.

    `auto` takes the best tier of this machine, `unsafe` has limits only. Raises ConfigError if there is no tier, or not
    the one named.
    """

    def __init__(self, tier: str = "auto", cpu_s: int = 4, memory_mb: int = 1024, output_mb: int = 8):
        one_of("tier", tier, ("auto", *TIERS, "unsafe"))
        for name, value, low in (("cpu_s", cpu_s, 1), ("memory_mb", memory_mb, 64), ("output_mb", output_mb, 1)):
            at_least(name, value, low)
            if not isinstance(value, int):
                raise ConfigError(name, value, "a whole number")
        self.silent_s = SILENT_S
        self.limits = {"cpu_s": cpu_s, "memory_bytes": memory_mb << 20, "output_bytes": output_mb << 20}
        missing = {}
        for self.tier in (tier,) if tier != "auto" else TIERS:
            lacks = self._lacks()
            if lacks is None:
                return
            missing[self.tier] = f"{self.tier} needs {FORMS[self.tier]}, but {lacks}"
        hint = "`python -m aligner doctor sandbox` lists the tiers here; tier `unsafe` runs programs without a sandbox."
        raise ConfigError("tier", tier, "a sandbox that this machine has", f"{'; '.join(missing.values())}. {hint}")

    def run(self, program: str | Sequence[str], inputs: Sequence[str]) -> Iterator[RunEnd]:
        """Run a program with each of these inputs as its standard input, one after another.

        The program is the last of several texts that is one. When the iterator ends or is closed, nothing of the
        program is left. Raises SandboxError if the sandbox itself fails, which is no verdict on the program.
        """
        with closing(self._session(program)) as session:
            for text in inputs:
                session.start(text)
                yield _end(session)

    def judge(self, program: str | Sequence[str], tests: Sequence[dict[str, Any]]) -> Iterator[RunEnd]:
        """Yield how a program passes each of these tests (verdicts.py).

        Each test is evaluated in a second sandbox, which asks for the results of the program's functions. `how` is also
        passed, wrong, error or unjudged.
        """
        with closing(self._session(program)) as session, ExitStack() as stack:
            judge = None
            for test in tests:
                session.start(serves=True)
                ended = session.next()
                if not isinstance(ended, RunEnd):  # it has run, and waits for calls
                    judge = judge or stack.enter_context(closing(self._session("", judges=True)))
                    judge.start()
                    judge.tell(json.dumps(test).encode())
                    ended = _judged(judge, session)
                    judge.stop()
                    session.stop()
                yield ended

    def _session(self, program: str | Sequence[str], judges: bool = False) -> ProgramSession:
        limits = self.limits
        if judges:
            limits = {**limits, "memory_bytes": max(JUDGE_BYTES, limits["memory_bytes"])}
            limits["output_bytes"] *= 2  # a program's results may go back to it
        job = {
            **limits,
            "program": [program] if isinstance(program, str) else list(program),
            "judges": judges,
            "total_s": TESTS * limits["cpu_s"],
            "readable": readable_paths(),
            "own_root": self.tier == "unshare",
            "landlock": self.tier != "unsafe" and landlock_version() > 0,
            "seccomp": self.tier != "unsafe",
        }
        return ProgramSession(self._command(), job, self.silent_s)

    def works(self) -> str | None:
        """Run a test program; return its failure, or None."""
        try:
            (ended,) = self.run("print(6 * 7)", [""])
        except SandboxError as error:
            return explained(str(error)) if self.tier in ("bubblewrap", "unshare") else str(error)
        return None if (ended.how, ended.out) == ("exit", "42\n") else f"a first program ended with {ended}"

    def _lacks(self) -> str | None:
        """Return why this tier does not work here, by using it; None if it works."""
        program = {"bubblewrap": "bwrap", "unshare": "unshare"}.get(self.tier)
        if program and shutil.which(program) is None:
            return f"there is no `{program}` in PATH"
        if self.tier in ("unshare", "landlock") and not landlock_version():
            return "the kernel has no Landlock"
        return self.works()

    def _command(self) -> list[str]:
        python = [os.path.realpath(sys._base_executable), "-s", "-S", str(RUNNER)]  # the standard library alone
        if self.tier == "unshare":
            apart = ["--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child"]
            return [_program("unshare"), *apart, *python]
        if self.tier != "bubblewrap":
            return python
        binds = [text for path in readable_paths() for text in ("--ro-bind", path, path)]
        apart = ["--unshare-user", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        device = ["--dev-bind", "/dev/null", "/dev/null"]
        return [_program("bwrap"), *apart, *binds, *device, "--remount-ro", "/", "--", *python]


def _program(name: str) -> str:
    """Return a program's full path, because the sandbox itself gets no PATH."""
    return shutil.which(name) or name


def readable_paths() -> list[str]:
    """Return the paths that a program may read: Python's installation, the system's libraries, and the folder of
    `runner.py`."""
    python = {sys.base_prefix, os.path.realpath(sys.base_prefix)}
    system = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")
    return [path for path in (*system, *sorted(python), str(RUNNER.parent)) if os.path.exists(path)]


def _end(session: ProgramSession) -> RunEnd:
    """Return the end of a run that receives no calls."""
    message = session.next()
    assert isinstance(message, RunEnd)
    return message


def _judged(judge: ProgramSession, program: ProgramSession) -> RunEnd:
    """Pass messages between judge and program until one of them decides."""
    while True:
        message = judge.next()
        if isinstance(message, RunEnd):  # by its limits, or because an answer was too large
            return RunEnd("unjudged")
        if message[:1] == b"=":
            return RunEnd(message[1:].decode())
        program.tell(message[1:])
        answer = program.next()
        if isinstance(answer, RunEnd):
            return answer
        judge.tell(answer)
