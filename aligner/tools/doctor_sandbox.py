"""`aligner doctor sandbox`: list the sandboxes of this machine for programs that models write, and check that they
hold.

Each attack is a program that prints its successes. It is contained if it prints none and leaves no effect outside. No
attack harms a machine without a sandbox: signals are number 0, files are removed, forks end.
"""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from aligner.errors import ConfigError
from aligner.sandbox.run import TIERS, Sandbox
from aligner.sandbox.terminal import lacks
from aligner.tools.doctor import FAIL, OK, WARN, Check, show
from aligner.tools.terminal_attacks import attack_terminal

# attack -> its program, which prints a line for each success
ATTACKS = {
    "read $HOME": """
for path in (HOME, HOME + "/secret", "/proc/self/environ", "/proc/1/environ", "/root", "/etc/passwd"):
    try:
        print(path, (os.listdir if os.path.isdir(path) else open)(path))
    except OSError: pass
""",
    "connect": """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT)); print("connected")
except OSError: pass
""",
    "fork bomb": """
for i in range(64):
    try:
        if os.fork() == 0: time.sleep(1); os._exit(0)
        print(i)
    except OSError: pass
""",
    "10 GB file": """
for folder in (HOME, "/tmp", "/dev/shm", "/var/tmp", ".", "/"):
    try:
        with open(folder + "/" + NAME, "wb") as file:
            for i in range(8): file.write(bytes(1 << 20))
        print(folder); os.remove(file.name)
    except OSError: pass
try:
    os.ftruncate(os.memfd_create("x"), 10 << 30); print("memory")
except OSError: pass
""",
    "ptrace the parent": """
import ctypes
for pid in (os.getppid(), PARENT):
    if ctypes.CDLL(None).ptrace(0x4206, pid, 0, 0) == 0: print(pid)
""",
    "kill -1": """
for pid in (-1, os.getppid(), PARENT):
    try:
        os.kill(pid, 0); print(pid)
    except OSError: pass
""",
    "orphan after the time-out": """
import ctypes
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, NAME[:15].encode()) or time.sleep(30)
        os._exit(0)
    print("an orphan")
except OSError: pass
while True: pass
""",
}


def main() -> int:
    """Print the table. Return 1 if there is no sandbox, or one does not hold."""
    results = list(checks())
    show(results, "aligner doctor sandbox")
    return int(any(check.status == FAIL for check in results))


def checks() -> Iterator[Check]:
    chosen = ""
    for tier in TIERS:
        try:
            sandbox = Sandbox(tier, cpu_s=1)
        except ConfigError as error:
            yield Check(tier, WARN, str(error))
            continue
        yield Check(tier, OK, "works here" if chosen else "works here, and is what `auto` takes")
        chosen = chosen or tier
        for name, program in ATTACKS.items():
            could = attack(sandbox, program)
            detail = f"not contained: {could[0]}" if could else "contained"
            yield Check(f"{tier}: {name}", FAIL if could else OK, detail)
    if not chosen:
        yield Check("sandbox", FAIL, "none of them works here: reward `code` cannot run programs")
    why = lacks()
    yield Check("terminal", WARN if why else OK, why or "works here: environments can give each trajectory its own")
    for name, could in ({} if why else attack_terminal()).items():
        detail = f"not contained: {could[0]}" if could else "contained"
        yield Check(f"terminal: {name}", FAIL if could else OK, detail)


def attack(sandbox: Sandbox, program: str) -> list[str]:
    """Return the successes of a program."""
    name = f"d{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(dir=Path.home()) as home, socket.create_server(("127.0.0.1", 0)) as server:
        Path(home, "secret").write_text("secret")
        server.settimeout(0)
        settings = {"HOME": home, "PORT": server.getsockname()[1], "NAME": name, "PARENT": os.getpid()}
        text = "import os, time\n" + "".join(f"{key} = {value!r}\n" for key, value in settings.items()) + program
        (ended,) = sandbox.run(text, [""])
        could = ended.out.splitlines() + _seen(lambda: server.accept()[1])
    processes = [process.info["name"] for process in psutil.process_iter(["name"])]
    return could + [f"process {each} is left" for each in processes if each == name[:15]]


def _seen(accept: Callable[[], tuple]) -> list[str]:
    try:
        return [f"a connection from {accept()}"]
    except BlockingIOError:
        return []
