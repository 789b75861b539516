"""Processes that leave none behind: a guard stands between this process and the one that it wants.

    this process ──> guard ──> the command ──> whatever that starts

When this process dies, or ends the guard by SIGTERM, the guard kills the command and all that has come of it, also what
has left its session: orphans become the guard's own children. So it does when the command ends by itself. It ends as
the command ended. Linux tells it of a death (PR_SET_PDEATHSIG), whatever holds the dying process's interpreter.
Standard library only: the guard runs this file alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 5.0  # how often the guard looks whether its parent is there, should no signal tell
END_S = 10.0  # for what was killed to be gone; what the kernel holds ends later
NO_PROGRAM = 127


def guarded(command: Sequence[str]) -> list[str]:
    """A command that runs `command`, for this process alone, whose thread that starts it is there as long."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _die_with(parent: int, number: int) -> None:
    """At this signal; at once, where it is dead already."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _guard(parent: int, command: Sequence[str]) -> int:
    """The command's exit code, negative for a signal."""
    watched = {signal.SIGTERM, signal.SIGCHLD}
    # a batch system sends these to all processes: they are the parent's to handle
    ignored = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched | ignored)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before - watched)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with(own, signal.SIGKILL)

    try:
        process = subprocess.Popen(command, preexec_fn=begin, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NO_PROGRAM
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # so that pipes end with the command
    os.dup2(nothing, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    code = None
    while code is None and os.getppid() == parent:
        if (told := signal.sigtimedwait(watched, LOOK_S)) and told.si_signo == signal.SIGTERM:
            break
        code = _reap(process.pid)
    return _end(process.pid, code)


def _reap(wanted: int) -> int | None:
    """Takes leave of the dead. The exit code of `wanted`, if it is one of them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            if dead[0] == wanted:
                found = os.waitstatus_to_exitcode(dead[1])
    return found


def _end(leader: int, code: int | None) -> int:
    """Kills until there are no children: those of the killed become ours."""
    until = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    while (living := _children()) and time.monotonic() < until:
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        found = _reap(leader)
        code = found if code is None else code
        time.sleep(0.002)
    return -signal.SIGKILL if code is None else code


def _children() -> list[int]:
    """Of this process, the dead that nobody took leave of among them."""
    own, found = str(os.getpid()), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1] == own:
                    found.append(int(folder.name))
    return found


def _leave(code: int) -> None:
    """As the command did."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _leave(_guard(int(sys.argv[1]), sys.argv[2:]))
