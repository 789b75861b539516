"""Processes of a terminal that take commands one after another. Runs inside the sandbox.

A command comes by standard input, and its exit status goes to descriptor STATUS. Imports nothing of the package.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

import confine

STATUS = 9
NICE = 10  # below the process that watches them
FILES = 256  # that a process may have open
BASH = ("bash", "--norc", "--noprofile", "--noediting", "-i")
BEGIN = "set +o history +H; RANDOM=1; exec 2>&1\n"  # its first words, that there is no terminal, are not heard
# The interpreter of the tool `python`: the last expression of a text is shown, as at its prompt.
PYTHON = """
import ast, os, sys, traceback
commands = os.fdopen(os.dup(0), "rb")
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
sys.argv, scope = [""], {"__name__": "__main__"}
sys.path.insert(0, "")
while True:
    line = commands.readline()
    if not line:
        break
    text, status = commands.read(int(line)).decode(), 0
    try:
        tree = ast.parse(text, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<python>", "eval"), scope)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        status = 1
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush(); sys.stderr.flush()
    os.write(9, b"%d\\n" % status)
"""
LIMITS = ("memory_bytes", "disk_bytes", "processes")


class Confinement:
    """What a process does before it runs a program of the terminal."""

    def __init__(self, limits: dict[str, int], root: str, environ: dict[str, str]):
        self.limits, self.root, self.environ = limits, root, environ

    def enter(self, folder: str) -> None:
        """Leave all but the terminal's files, the rights of a user namespace, and what `REFUSED` has."""
        os.chroot(self.root)
        try:
            os.chdir(folder)
        except OSError:
            os.chdir("/")
        os.setsid()
        os.nice(NICE)
        kinds = (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
        values = [(kind, self.limits[name]) for kind, name in zip(kinds, LIMITS, strict=True)]
        for kind, value in (*values, (resource.RLIMIT_NOFILE, FILES), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (value, value))
        confine.give_up_rights(forever=True)
        confine.seccomp(terminal=True)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # some are ignored above
            signal.signal(number, signal.SIG_DFL)


class ShellProcess:
    """A process of the terminal; `reports`: by descriptor STATUS when a command has ended, else its own end does."""

    def __init__(
        self,
        confinement: Confinement,
        run: Callable[[], object],
        output: int,
        folder: str,
        reports: bool,
        errors: int | None = None,
    ):
        (stdin, self.stdin), (self.status, status) = os.pipe(), os.pipe()
        self.reports, self.unsent = reports, bytearray()
        self.code: int | None = None  # of its exit, as a shell counts
        self.pid = os.fork()
        if self.pid == 0:
            _run(confinement, run, (stdin, output, output if errors is None else errors, status), folder)
        os.close(stdin)
        os.close(status)
        os.set_blocking(self.stdin, False)
        self.exited = os.pidfd_open(self.pid)

    def close(self) -> None:
        for fd in (self.stdin, self.status, self.exited):
            os.close(fd)


def _run(confinement: Confinement, run: Callable[[], object], fds: tuple[int, int, int, int], folder: str) -> None:
    code = 125
    try:
        for fd, target in zip(fds, (0, 1, 2, STATUS), strict=True):
            os.dup2(fd, target)
            os.set_inheritable(target, True)
        os.closerange(3, STATUS)
        os.closerange(STATUS + 1, FILES)
        confinement.enter(folder)
        run()
        code = 0
    except BaseException as error:
        os.write(1, f"error: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def program(command: Sequence[str], environ: dict[str, str]) -> Callable[[], object]:
    """Return what becomes this program."""

    def become() -> None:
        for folder in environ["PATH"].split(":"):  # os.execvpe would import a module, which an image may not have
            with suppress(OSError):
                os.execve(f"{folder}/{command[0]}", list(command), environ)
        raise FileNotFoundError(f"there is no program {command[0]}")

    return become


def bash_command(text: str) -> bytes:
    """Return two lines for bash: the command, and one that reports its exit status, also after an interrupt."""
    eval_line = f"builtin eval {shlex.quote(text)} </dev/null {STATUS}>&-\n"
    return (eval_line + f"builtin printf '%s\\n' \"$?\" >&{STATUS}\n").encode(errors="replace")


def python_command(text: str) -> bytes:
    data = text.encode(errors="replace")
    return b"%d\n%s" % (len(data), data)
