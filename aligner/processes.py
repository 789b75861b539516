"""Processes that leave no children behind: a guard stands between this process and a command.

    this process ──> guard ──> the command ──> its children

When this process dies, or ends the guard by SIGTERM, the guard kills the command and all its descendants, also those
that have left its session: orphans become the guard's own children. It does the same when the command ends, and then
ends as the command did. Linux notifies it of a death (PR_SET_PDEATHSIG), even while the dying process's interpreter
is blocked. Standard library only: the guard runs this file alone.
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
LOOK_S = 5.0  # interval of the guard's checks of its parent, should no signal come
END_S = 10.0  # for killed processes to be gone; those that the kernel holds end later
NO_PROGRAM = 127
# to save and stop: a terminal, or Slurm without control groups, sends them to all processes, but they are the rank's
REQUESTS = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def leave_requests_to_rank() -> None:
    """Let this process, a helper of a rank, ignore requests to save and stop."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` for this process alone. The thread that starts it must live as long."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _die_with(parent: int, number: int) -> None:
    """Die with the parent by this signal; at once if it is dead already."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _guard(parent: int, command: Sequence[str]) -> int:
    """Run and guard a command; return its exit code, negative for a signal."""
    watched = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched | REQUESTS)
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
        if (received := signal.sigtimedwait(watched, LOOK_S)) and received.si_signo == signal.SIGTERM:
            break
        code = _reap(process.pid)
    return _end(process.pid, code)


def _reap(wanted: int) -> int | None:
    """Reap dead children; return the exit code of `wanted`, if it is one of them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            if dead[0] == wanted:
                code = os.waitstatus_to_exitcode(dead[1])
    return code


def _end(leader: int, code: int | None) -> int:
    """Kill until there are no children: those of killed processes become this one's."""
    until = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    while (living := _children()) and time.monotonic() < until:
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reaped = _reap(leader)
        code = reaped if code is None else code
        time.sleep(0.002)
    return -signal.SIGKILL if code is None else code


def _children() -> list[int]:
    """Return the children of this process, unreaped dead ones included."""
    own, pids = str(os.getpid()), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1] == own:
                    pids.append(int(folder.name))
    return pids


def _leave(code: int) -> None:
    """End as the command did."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _leave(_guard(int(sys.argv[1]), sys.argv[2:]))
