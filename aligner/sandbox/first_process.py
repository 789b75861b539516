"""The first process of a terminal's sandbox: builds its file system, then has commands executed and watches them.

It reads the job, then requests, from its standard input, and answers on its standard output (frames.py). Between two
requests all processes of the terminal are stopped. When it ends, the kernel ends them.
Runs as a file, so it imports nothing of the package.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from contextlib import suppress

import confine
import shells
from frames import receive, send
from root import RootFolder, hand_out, name_host, raise_loopback

LOOK_S = 0.05
IDLE_LOOK_S = 0.2  # after a look at which nothing ran: many agents wait for a model at once
LATE_S = 0.05  # of a look: the rest is this process's own wait for a processor
INTERRUPTED_S = 1.0  # of waiting or computing, for a shell to come back to its next line
RESERVED_PIDS = 300  # that a kernel gives out only once
FLOOD_BYTES = 64 << 20  # of output
FIRST_READ = 1 << 20  # bytes of a file that is asked for
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PROCESSES_ENDED = ", and its processes were ended, since an interrupt did not stop them"
SHELL_ENDED = ", and the shell was ended, since an interrupt did not stop it: the next call has a new one"
KILLED = "every process of the terminal was ended"


class Output:
    """The first and the last bytes of what a command writes."""

    def __init__(self, most: int):
        self.half, self.count, self.first, self.last = most // 2, 0, bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.count += len(data)
        room = self.half - len(self.first)
        self.first += data[:room]
        self.last += data[max(0, room) :]
        del self.last[: -self.half]

    def text(self) -> str:
        cut = self.count - len(self.first) - len(self.last)
        texts = [data.decode(errors="replace") for data in (self.first, self.last)]
        return "".join(texts) if not cut else f"{texts[0]}\n... ({cut} bytes cut) ...\n{texts[1]}"


class FirstProcess:
    def __init__(self, job: dict):
        self.job, self.waited = job, 0.0
        self.look_s, self.computed = LOOK_S, 0.0  # until the next look; CPU seconds at the last one
        self.workers: dict[str, shells.ShellProcess] = {}  # shells
        self.alone: shells.ShellProcess | None = None  # for one request
        self.output, self.writes = os.pipe()
        os.set_blocking(self.output, False)
        self.root = RootFolder(job["image"], job["paths"], job["disk_bytes"], job["readable"])
        self.confinement = shells.Confinement(job, self.root.path, job["environ"])
        os.makedirs(self.root.path + job["folder"], exist_ok=True)

    def answer(self, request: dict) -> dict:
        """Carry out a request; return its output, its exit status, and why it ended early: {out, status, why}."""
        kind, limits = request["do"], request
        if kind == "renew":
            self.end_all()
            self.root.renew()
            for fd in (self.output, self.writes):
                os.close(fd)
            self.output, self.writes = os.pipe()
            os.set_blocking(self.output, False)
            return {"out": "", "status": 0, "why": ""}
        if kind in ("bash", "python"):
            worker = self.shell(kind)  # while others cannot take its place
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGCONT)
            command = shells.bash_command if kind == "bash" else shells.python_command
            worker.unsent += command(request["text"])
        else:
            worker = self.alone = self.once(request)
        answer = self.watched(worker, limits)
        if self.alone is not None:
            self.alone.close()
            self.alone = None
        return answer

    def once(self, request: dict) -> shells.ShellProcess:
        """Start a process for one request."""
        if request["do"] == "run":
            run = shells.program(request["command"], request["environ"])
        else:
            run = functools.partial(globals()[f"do_{request['do']}"], **request["arguments"])
        return shells.ShellProcess(self.confinement, run, self.writes, request.get("folder") or self.folder(), False)

    def shell(self, kind: str) -> shells.ShellProcess:
        worker = self.workers.get(kind)
        if worker is None:
            command = shells.BASH if kind == "bash" else ("python3", "-u", "-c", shells.PYTHON)
            run = shells.program(command, self.job["environ"])
            # its complaint that there is no terminal is not for the model
            null = os.open("/dev/null", os.O_WRONLY) if kind == "bash" else self.writes
            worker = self.workers[kind] = shells.ShellProcess(
                self.confinement, run, self.writes, self.folder(), True, null
            )
            if kind == "bash":
                os.close(null)
                worker.unsent += shells.BEGIN.encode()
        return worker

    def folder(self) -> str:
        """Return the folder of the shell, in which relative names are looked for."""
        if "bash" in self.workers:
            with suppress(OSError):
                path = os.readlink(f"/proc/{self.workers['bash'].pid}/cwd")
                return path.removeprefix(self.root.path) or "/"
        return self.job["folder"]

    def watched(self, worker: shells.ShellProcess, limits: dict) -> dict:
        output, status = Output(self.job["output_bytes"]), None
        begun, why, looked, self.waited = self.usage()[0], "", time.monotonic(), 0.0
        self.look_s = LOOK_S
        while status is None and not why:
            status = self.step(worker, output)
            if output.count > FLOOD_BYTES:
                why = f"it wrote more than {FLOOD_BYTES >> 20} MiB"
            elif time.monotonic() - looked >= self.look_s:
                passed, looked = min(time.monotonic() - looked, self.look_s + LATE_S), time.monotonic()
                why = self.exceeded(begun, passed, limits)
        if why.startswith("it ") and worker.reports:
            why += self.interrupt(worker, output)
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        self.reap()
        why = self.crowded(self.usage()[3]) or why  # now none can multiply
        if why and not (why.startswith("it ") and worker.reports):
            self.end_all()
            why += f", and {KILLED}"
        self.read(output)
        if worker.reports and worker.code is not None and not why:
            why = "the shell has ended: the next call has a new one"
        for kind in [kind for kind, each in self.workers.items() if each.code is not None]:
            self.workers.pop(kind).close()
        return {"out": output.text(), "status": status, "why": why}

    def step(self, worker: shells.ShellProcess, output: Output) -> int | None:
        """Wait a little for something to happen; return the exit status once it is known."""
        poll = select.poll()
        for fd in (self.output, worker.exited, *([worker.status] if worker.reports else [])):
            poll.register(fd, select.POLLIN)
        poll.register(0, 0)
        if worker.unsent:
            poll.register(worker.stdin, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(1000 * self.look_s)}
        if 0 in ready:
            sys.exit()  # the host has closed the pipe
        if self.output in ready:
            self.read(output, pieces=16)
        if worker.stdin in ready:
            with suppress(BlockingIOError, BrokenPipeError):
                del worker.unsent[: os.write(worker.stdin, worker.unsent[: 1 << 16])]
        if worker.reports and worker.status in ready:
            text = os.read(worker.status, 99)
            if text:
                return int(text) if text.strip().isdigit() and len(text) < 6 else 0
            if worker.code is None:  # it has closed its end, so nothing would tell of its commands
                os.kill(worker.pid, signal.SIGKILL)
                os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        if worker.exited in ready:
            self.reap()
            return worker.code
        return None

    def read(self, output: Output, pieces: int = 1 << 10) -> None:
        with suppress(BlockingIOError):
            for _ in range(pieces):
                output.add(os.read(self.output, 1 << 16))

    def exceeded(self, begun: float, passed: float, limits: dict) -> str:
        """Return which limit a command exceeds. It waits while none of its processes could run or is held by the
        kernel, however busy the machine is."""
        self.reap()
        computed, resident, running, pids = self.usage()
        if not running:
            self.waited += passed
        self.look_s = LOOK_S if running or computed > self.computed else IDLE_LOOK_S
        self.computed = computed
        if why := self.crowded(pids):
            return why
        if resident > self.job["memory_bytes"] and self.proportional(pids) > self.job["memory_bytes"]:
            return f"the processes used more than {self.job['memory_bytes'] >> 20} MiB of memory"
        if computed - begun >= limits["cpu_s"]:
            return f"it computed for {limits['cpu_s']:g} s"
        if self.waited >= limits["waits_s"]:
            return f"it waited for {limits['waits_s']:g} s"
        return ""

    def crowded(self, pids: list[int]) -> str:
        most = self.job["processes"]
        return f"there were more than {most} processes" if len(pids) > most else ""

    def usage(self) -> tuple[float, int, bool, list[int]]:
        """Return CPU seconds of all processes since the beginning; of the living their resident bytes, whether one
        runs, and their ids."""
        of_dead = resource.getrusage(resource.RUSAGE_CHILDREN)
        computed, resident, running = of_dead.ru_utime + of_dead.ru_stime, 0, False
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        for pid in pids if len(pids) <= self.job["processes"] else ():
            with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                computed += sum(map(int, fields[11:15])) / TICKS
                resident += int(fields[21]) * PAGE
                running = running or fields[0] in b"RD"
        return computed, resident, running, pids

    def proportional(self, pids: list[int]) -> int:
        """Return the memory of processes, each shared page counted once."""
        kib = 0
        for pid in pids:
            with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                kib += next((int(line.split()[1]) for line in file if line.startswith(b"Pss:")), 0)
        return kib << 10

    def interrupt(self, worker: shells.ShellProcess, output: Output) -> str:
        """Let a shell come back: by a signal, then without its processes, else end it. Return what that has ended."""
        shell_pids = {each.pid for each in self.workers.values()}
        for attempt in range(4):
            if attempt == 1:  # a signal as well might come when the shell is back, and be seen in the next call
                for pid in set(self.usage()[3]) - shell_pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGINT if attempt < 3 else signal.SIGKILL)
            if self.comes_back(worker, output):
                return SHELL_ENDED if worker.code is not None else PROCESSES_ENDED if attempt else ""
        return SHELL_ENDED

    def comes_back(self, worker: shells.ShellProcess, output: Output) -> bool:
        """Wait for a shell; return whether it comes back before its processes wait or compute for INTERRUPTED_S."""
        begun, waited, looked, self.look_s = self.usage()[0], 0.0, time.monotonic(), LOOK_S
        while self.step(worker, output) is None:
            computed, _, running, _ = self.usage()
            passed, looked = min(time.monotonic() - looked, LOOK_S + LATE_S), time.monotonic()
            waited += 0.0 if running else passed
            if max(waited, computed - begun) >= INTERRUPTED_S:
                return False
        return True

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                self.note(*dead)

    def note(self, pid: int, status: int) -> None:
        for worker in (*self.workers.values(), self.alone):
            if worker is not None and worker.pid == pid:
                code = os.waitstatus_to_exitcode(status)
                worker.code = code if code >= 0 else 128 - code

    def end_all(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                self.note(*os.waitpid(-1, 0))


def regular(path: str, flags: int) -> int:
    """Open a file; a pipe would wait for its other end."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(f"{path} is no regular file")
    return fd


def do_write(files: dict[str, str]) -> None:
    """Write files, whose contents are in base 64."""
    for path, text in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(base64.b64decode(text))


def do_edit(path: str, old: str, new: str) -> None:
    with open(regular(path, os.O_RDONLY), "rb") as file:
        text = file.read()
    count = text.count(old.encode()) if old else 0
    if count != 1:
        raise ValueError(f"expected the old text once in {path}, found it {count} times")
    with open(regular(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(text.replace(old.encode(), new.encode()))


def do_read(path: str) -> None:
    with open(regular(path, os.O_RDONLY), "rb") as file:
        os.write(1, file.read(FIRST_READ))


def bound_processes(most: int) -> None:
    """Let the kernel refuse processes far beyond the limit. For users other than root RLIMIT_NPROC does so before."""
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 14):  # before, the number is the whole machine's
        with open("/proc/sys/kernel/pid_max", "w") as file:
            file.write(str(RESERVED_PIDS + 4 * most))


def main() -> None:
    job = json.loads(receive()[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of the terminal's own programs
        signal.signal(number, signal.SIG_IGN)
    confine.hide()
    name_host("sandbox")
    raise_loopback()
    hand_out(job["ports"], job["bridge"])
    first = FirstProcess(job)
    bound_processes(job["processes"])  # in a /proc of its own: a container's may be read-only
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # rather than a rank of the run
    send(b"m", b"{}")
    while True:
        send(b"m", json.dumps(first.answer(json.loads(receive()[1]))).encode())


if __name__ == "__main__":
    main()
