"""The process in a sandbox that runs one program once for each test: reads the job, then a test at a time, from its
standard input, and answers to each on its standard output. A message: 8 bytes of length, then JSON.

Each run is a child of its own, forked from this warm interpreter before the test has been read, so that no object of
the child holds it: a program's standard input and, once the program has ended, what is to be called or asserted lie in
files without a name. What was expected stays outside, or is the assertion itself. The child confines itself first.
Runs as a file, so it imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import sys
import time
import types
import typing

import confine

MEMORY, WRONG = 99, 98  # exit codes of a program that ran out of it; of an assertion that does not hold
LOOK_S = 0.1
# A look finds a run idle that has computed less than a hundredth of the time at the least. One that waits for its turn
# on a busy machine has computed more, and this process then looks later, too: the count does not depend on the load.
IDLE_S, IDLE_LOOKS = 0.001, 100


def receive() -> dict:
    return json.loads(_exactly(int.from_bytes(_exactly(8), "little")))


def _exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 20))
        if not piece:
            sys.exit()  # nobody asks any more
        data += piece
    return bytes(data)


def send(answer: dict) -> None:
    text = json.dumps(answer).encode()
    _write(1, len(text).to_bytes(8, "little") + text)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    job = receive()
    sys.path.remove(os.path.dirname(__file__))  # programs shall not find these modules
    del sys.modules["confine"], sys.argv[1:]
    module = types.ModuleType("__main__")
    module.__dict__.update((name, getattr(typing, name)) for name in typing.__all__)  # starter code leaves it out
    while run(job, module):
        pass


def run(job: dict, module: types.ModuleType) -> bool:
    """One test. False in the child, whose program has ended: a function of its own, so that the next child does not
    find this test."""
    stdin, check = os.memfd_create("stdin"), os.memfd_create("check")
    (go, start), (out, stdout), (said, says) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.modules["__main__"] = module
        child(job, module.__dict__, stdin, stdout, go, check, says)
        return False
    for fd in (go, stdout, says):
        os.close(fd)
    try:
        test = receive()
        os.pwrite(stdin, test["stdin"].encode(errors="replace"), 0)
        os.pwrite(check, json.dumps(test["check"]).encode(), 0)
        os.write(start, b"1")
        found = watch(pid, out, said, job["output_bytes"], job["cpu_s"])
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    send(found | _end(found["ended"], os.waitstatus_to_exitcode(status), usage, job["cpu_s"]))
    for fd in (stdin, check, start, out, said):
        os.close(fd)
    return True


def watch(pid: int, out: int, said: int, output_bytes: int, cpu_s: int) -> dict:
    """Reads what a run writes until it ends, writes or computes too much, or does nothing for long."""
    texts, exited, ended = {out: bytearray(), said: bytearray()}, os.pidfd_open(pid), ""
    clock = (~pid << 3) | 2  # the CPU clock of a process (clock_getcpuclockid)
    poll, left = select.poll(), {out, said}
    for fd in (out, said, exited):
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    idle, looked, before = 0, time.monotonic(), time.clock_gettime(clock)
    while not ended:
        ready = {fd for fd, _ in poll.poll(1000 * LOOK_S)}
        for fd in sorted(left & ready if exited not in ready else left):
            if _drain(fd, texts[fd], output_bytes):
                poll.unregister(fd)
                left.remove(fd)
        if sum(map(len, texts.values())) > output_bytes:
            ended = "output"
        elif exited in ready:
            break
        elif time.monotonic() - looked >= LOOK_S:
            try:
                now = time.clock_gettime(clock)
            except OSError:
                continue  # it has just ended
            idle += now - before < IDLE_S
            looked, before = time.monotonic(), now
            if now >= cpu_s:
                ended = "cpu"
            elif idle >= IDLE_LOOKS:
                ended = "hung"
    os.close(exited)
    out_text, said_text = (texts[fd].decode(errors="replace") for fd in (out, said))
    return {"ended": ended, "out": out_text, "said": said_text}


def _drain(fd: int, text: bytearray, most: int) -> bool:
    """Reads what is there, a little more than `most` at the most; whether that was the last of it."""
    while len(text) <= most:
        try:
            piece = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not piece:
            return True
        text += piece
    return False


def _end(ended: str, code: int, usage: resource.struct_rusage, cpu_s: int) -> dict:
    """`ended`: why `watch` ended it, "" where it ended by itself. What has used up its time is late in either case, so
    that it does not matter when `watch` looked."""
    if not ended and usage.ru_utime + usage.ru_stime >= cpu_s:
        ended = "cpu"
    elif not ended and code == -signal.SIGKILL:
        ended = "killed"  # by somebody outside, which says nothing of the program
    return {"ended": ended or {MEMORY: "memory", WRONG: "wrong"}.get(code, "exit"), "code": code}


def child(job: dict, names: dict, stdin: int, stdout: int, go: int, check: int, says: int) -> None:
    """Returns into the end of the interpreter, as a program's end: threads are joined, exit functions called."""
    try:
        null = os.open("/dev/null", os.O_WRONLY)
        for fd, target in ((stdin, 0), (stdout, 1), (null, 2)):
            os.dup2(fd, target)
        for fd in set(range(3, 64)) - {go, check, says}:
            try:
                os.close(fd)
            except OSError:
                continue
        confine.die_with_parent()
        if not os.read(go, 1):
            os._exit(0)
        confine.limits(job["cpu_s"], job["memory_bytes"])
        if job["landlock"]:
            confine.landlock(job["readable"])
        if job["seccomp"]:
            confine.seccomp()
    except OSError as error:
        os.write(says, f"!{error}".encode())
        os._exit(1)
    os.write(says, b"+")
    random.seed(0)
    try:
        exec(compile(job["program"], "<program>", "exec"), names)
        if test := json.loads(os.pread(check, os.fstat(check).st_size, 0)):
            _write(says, (test["word"] + _answer(test, names)).encode())
            os._exit(0)
    except MemoryError:
        os._exit(MEMORY)
    except AssertionError:
        os._exit(WRONG)


def _answer(test: dict, names: dict) -> str:
    """Asserts, or what a function returns to these arguments; the function, or a method of the class Solution."""
    if "code" in test:
        exec(test["code"], names)
        return ""
    owner = names["Solution"]() if "Solution" in names else types.SimpleNamespace(**names)
    return json.dumps(getattr(owner, test["call"])(*test["args"]), default=list)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
