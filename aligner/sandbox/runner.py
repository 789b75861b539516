"""The process in a sandbox that runs or judges one program, once for each test. It reads the job, then commands,
from its standard input, and answers on its standard output.

Each run is a child, forked from this warm interpreter, that confines itself first. A child that is asked for results
talks with the process that judges it, in another sandbox, by messages that pass through here unread. So no process that
shares memory, files or rights with the program holds the expected results.
A message: a letter, 8 bytes of length, then its text. s: start a run (JSON), m: a message to or of the child,
x: end the run; e: it has ended (JSON). Runs as a file, so it imports nothing of the package.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import select
import signal
import sys
import time
import types
import typing

import confine
import served
import wire
from fair_clock import FairClock
from frames import receive, send

MEMORY = 99  # exit code of a program that ran out of it
LOOK_S = 0.1
WAITS_S = 5.0  # total wait of a program, on its own account; as much again as it computes is the clock's error
MODULES = ("confine", "fair_clock", "frames", "served", "wire", "peer", "subjects", "verdicts")


def main() -> None:
    job = json.loads(receive()[1])
    if job["judges"]:
        import verdicts

        job["judge"] = verdicts.judge
    if job["own_root"]:
        confine.leave_other_files(job["readable"])
    sys.path.remove(os.path.dirname(__file__))  # programs must not find these modules
    for name in MODULES:
        sys.modules.pop(name, None)
    del sys.argv[1:]
    module = types.ModuleType("__main__")
    module.__dict__.update((name, getattr(typing, name)) for name in typing.__all__)  # starter code omits these imports
    builtins.exit = builtins.quit = sys.exit  # Python defines them only with its module `site`
    sys.set_int_max_str_digits(0)  # the time of a program is bounded in any case
    clock = FairClock()
    while True:
        kind, text = receive()
        if kind == b"s" and not ProgramRun(job, json.loads(text), module, clock).done():
            return  # the child, whose program has ended


class ProgramRun:
    """A child and its messages. It `owes` while its next message, or its end, is due."""

    def __init__(self, job: dict, test: dict, module: types.ModuleType, clock: FairClock):
        self.job, self.clock = job, clock
        self.owes, self.ended, self.started = True, "", b""
        stdin = os.memfd_create("stdin")
        os.pwrite(stdin, test["stdin"].encode(errors="replace"), 0)
        (self.out, stdout), (self.says, says), (asks, self.asks) = os.pipe(), os.pipe(), os.pipe()
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            confine.die_with_parent(parent)
            sys.modules["__main__"] = module
            child(job, test, module, (stdin, stdout, asks, says))
            return
        for fd in (stdin, stdout, says, asks):
            os.close(fd)
        self.texts, self.unsent = {self.out: bytearray(), self.says: bytearray()}, bytearray()
        self.exited = os.pidfd_open(self.pid)

    def done(self) -> bool:
        """Wait for the end and report it. Return False in the child."""
        if self.pid == 0:
            return False
        try:
            self.watch()
        finally:
            os.kill(self.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self.pid, 0)
            self.clock.stop()
        code = os.waitstatus_to_exitcode(status)
        out = self.texts[self.out].decode(errors="replace")
        problem = (self.texts[self.says] if self.started == b"!" else b"").decode(errors="replace")
        how, started = self.how(code, usage.ru_utime + usage.ru_stime), self.started == b"+"
        end = {"how": how, "code": code, "out": out, "problem": problem, "started": started}
        send(b"e", json.dumps(end).encode())
        for fd in (self.out, self.says, self.asks, self.exited):
            os.close(fd)
        return True

    def how(self, code: int, cpu_s: float) -> str:
        """Return how the run ended. A run that has used up its time is late, independent of when `watch` looked."""
        self.clock.computed += cpu_s
        if not self.ended and (cpu_s >= self.job["cpu_s"] or self.over(0)):
            return "cpu"
        if not self.ended and code == -signal.SIGKILL:
            return "killed"  # from outside, which is no property of the program
        return self.ended or {MEMORY: "memory"}.get(code, "exit")

    def watch(self) -> None:
        """Watch the child until it ends, writes or computes too much, or waits too long."""
        poll, self.reading = select.poll(), {self.out, self.says}
        for fd in (self.out, self.says, self.asks):
            os.set_blocking(fd, False)
        for fd in (self.out, self.says, self.exited, 0):
            poll.register(fd, select.POLLIN)
        self.clock.start()
        begun, looked = self.clock.spent, time.monotonic()
        while not self.ended:
            ready = {fd for fd, _ in poll.poll(1000 * LOOK_S)}
            for fd in sorted(self.reading & ready if self.exited not in ready else self.reading):
                self.read(fd, poll)
            self.pass_on()
            if self.exited in ready:
                return
            if 0 in ready:
                self.obey(poll)
            if self.asks in ready:
                self.write(poll)
            if time.monotonic() - looked >= LOOK_S and not self.ended:
                looked = time.monotonic()
                self.look(begun)

    def look(self, begun: float) -> None:
        try:
            computed = time.clock_gettime((~self.pid << 3) | 2)  # the CPU clock of a process (clock_getcpuclockid)
        except OSError:
            return  # it has just ended
        self.clock.look()
        if computed >= self.job["cpu_s"] or self.over(computed):
            self.ended = "cpu"
        elif self.clock.spent - begun - 2 * computed > WAITS_S:
            self.ended = "hung"

    def over(self, computed: float) -> bool:
        """Return whether this run, with those before it, has used up the time of all."""
        return max(self.clock.spent, self.clock.computed + computed) >= self.job["total_s"]

    def read(self, fd: int, poll: select.poll) -> None:
        """Read the available output, at most a little more than allowed."""
        text, most = self.texts[fd], self.job["output_bytes"]
        while len(text) <= most + 9:
            try:
                piece = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not piece:
                poll.unregister(fd)
                self.reading.discard(fd)
                return
            text += piece
        self.ended = "output"

    def pass_on(self) -> None:
        """Pass a whole message of the child to the judge, or of the judge to the child that it judges."""
        text = self.texts[self.says]
        if text and not self.started:
            self.started = bytes(text[:1])
            del text[:1]
        if self.started == b"!" or self.ended:
            return
        if text and not self.owes:
            self.ended = "protocol"
        elif len(text) >= 8:
            length = int.from_bytes(text[:8], "little")
            if length > self.job["output_bytes"]:
                self.ended = "output"
            elif len(text) >= 8 + length:
                message = bytes(text[8 : 8 + length])
                del text[: 8 + length]
                self.owes = False
                self.clock.stop()
                send(b"m", message)

    def obey(self, poll: select.poll) -> None:
        kind, message = receive()
        if kind == b"x":
            self.ended = "stopped"
        else:
            self.unsent += len(message).to_bytes(8, "little") + message
            poll.register(self.asks, select.POLLOUT)
            self.owes = True
            self.clock.start()

    def write(self, poll: select.poll) -> None:
        """Write to the child without blocking, so that a child that does not read delays no run."""
        try:
            del self.unsent[: os.write(self.asks, self.unsent[: 1 << 16])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent.clear()
        if not self.unsent:
            poll.unregister(self.asks)


def child(job: dict, test: dict, module: types.ModuleType, fds: tuple[int, int, int, int]) -> None:
    """Confine this process, then run the program.

    Returns into the end of the interpreter, as a program does: threads are joined, exit functions called.
    """
    stdin, stdout, asks, says = fds
    try:
        null = os.open("/dev/null", os.O_WRONLY)
        for fd, target in ((stdin, 0), (stdout, 1), (null, 2)):
            os.dup2(fd, target)
        for fd in set(range(3, 64)) - {asks, says}:
            try:
                os.close(fd)
            except OSError:
                continue
        confine.limits(job["cpu_s"], job["memory_bytes"])
        if job["landlock"]:
            confine.landlock(job["readable"])
        if job["seccomp"]:
            confine.seccomp()
    except OSError as error:
        os.write(says, f"!{error}".encode())
        os._exit(1)
    os.write(says, b"+")
    channel = wire.Channel(asks, says)
    try:
        if job["judges"]:
            job["judge"](json.loads(channel.read()), channel, module)
            os._exit(0)
        if test["serves"]:
            served.serve(job["program"], module.__dict__, channel)
        os.close(asks)
        os.close(says)
        served.run(job["program"], module.__dict__)
    except MemoryError:
        os._exit(MEMORY)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
