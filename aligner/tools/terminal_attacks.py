"""Attacks on a terminal's sandbox: programs that one Python process of it runs one after another, each in a child.

An attack prints a line for each success. Calls of the kernel get arguments that harm nothing where they are not
refused: an answer other than a refusal is a success.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import uuid
from pathlib import Path

from aligner.errors import SandboxError
from aligner.foreign import parse_json
from aligner.sandbox.terminal import TerminalLimits, TerminalSandbox

OWN_PIDS = 600  # the terminal has processes of lower numbers itself, as a container may
FOLDERS = ["/dev/shm", "/tmp", "/run"]
# what the programs use; HOST is filled in: names and numbers of what is outside
COMMON = """
import ctypes, errno, glob, json, os, resource, signal, socket, stat, sys, time
libc, machine = ctypes.CDLL(None, use_errno=True), os.uname().machine
NO = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EROFS, errno.EAFNOSUPPORT, errno.ENOENT, errno.ENXIO, errno.ENODEV}
def call(name, x86_64, aarch64, *arguments):
    result = libc.syscall(x86_64 if machine == "x86_64" else aarch64, *map(ctypes.c_long, arguments))
    if result >= 0 or ctypes.get_errno() not in NO:
        print(name, result, ctypes.get_errno())
def attempt(name, function, *arguments):
    try:
        print(name, function(*arguments))
    except OSError: pass
def put(path, text="x"):
    with open(path, "w") as file:
        file.write(text)
def show(path):
    with open(path, "rb") as file:
        return file.read(99)
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as link:
        link.settimeout(1)
        link.connect(address)
"""
ATTACKS = {
    "see the job's files": """
for path in (HOST["home"], HOST["home"] + "/secret", *(f"/proc/{pid}" for pid in HOST["pids"])):
    if os.path.exists(path): print(path)
""",
    "look into the first process": """
for name in ("root/image", "fd", "mem", "environ", "cwd", "ns/mnt", "maps"):
    if os.path.lexists("/proc/1/" + name): print(name)
""",
    "find a descriptor that leads outside": """
for fd in os.listdir("/proc/self/fd"):
    try:
        target = os.readlink("/proc/self/fd/" + fd)
    except OSError: continue
    if not target.startswith(("pipe:", "/dev/null", "/proc/")): print(target)
""",
    "read the kernel's memory and secrets": """
for name in ("kcore", "kmsg", "keys", "vmallocinfo", "slabinfo", "1/pagemap"):
    try:
        if show("/proc/" + name): print(name)
    except OSError: pass
if any(line.split()[0].strip("0") for line in open("/proc/kallsyms").readlines()[:99]): print("addresses")
""",
    "write to the kernel's settings": """
for name in ("kernel/core_pattern", "vm/drop_caches", "kernel/pid_max", "user/max_user_namespaces"):
    attempt(name, os.open, "/proc/sys/" + name, os.O_WRONLY)
attempt("sysrq", os.open, "/proc/sysrq-trigger", os.O_WRONLY)
""",
    "escape the watch for memory": """
for name in ("oom_score_adj", "oom_adj", "clear_refs", "coredump_filter", "timerslack_ns"):
    attempt(name, os.open, "/proc/self/" + name, os.O_WRONLY)
""",
    "write a map of users": """
for name in ("uid_map", "gid_map", "setgroups", "projid_map"):
    attempt(name, os.open, "/proc/self/" + name, os.O_WRONLY)
""",
    "make namespaces by unshare": """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000):
    call("unshare", 272, 97, flag)
""",
    "make a namespace by clone": "call('clone', 56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "make a namespace by clone3": "call('clone3', 435, 435, 0, 0)",
    "enter a namespace": "fd = os.open('/proc/self/ns/net', os.O_RDONLY); call('setns', 308, 268, fd, 0)",
    "mount": "call('mount', 165, 40, 0, 0, 0, 0, 0); call('umount2', 166, 39, 0, 0)",
    "mount by the new calls": """
for number in (428, 429, 430, 431, 432, 433, 442):
    call(number, number, number, -1, 0, 0, 0, 0)
""",
    "change the root": "call('chroot', 161, 51, 0); call('pivot_root', 155, 41, 0, 0)",
    "open a file by its handle": """
call("name_to_handle_at", 303, 264, -1, 0, 0, 0, 0); call("open_by_handle_at", 304, 265, -1, 0, 0)
""",
    "climb out by links and ..": """
os.symlink("/proc/1/root", "r"); os.symlink("../" * 40 + HOST["home"].lstrip("/"), "h")
for path in ("r/image", "h", "../" * 40 + HOST["home"].lstrip("/")):
    if os.path.exists(path): print(path)
""",
    "open devices": """
for name in (
    "mem", "kmem", "port", "kmsg", "fuse", "kvm", "vsock", "vhost-vsock", "net/tun", "sda", "vda", "nvme0n1",
    "nvidia0", "nvidiactl", "ptmx", "tty", "console", "userfaultfd", "snapshot", "loop0",
):
    try:
        os.close(os.open("/dev/" + name, os.O_RDONLY)); print(name)
    except OSError: pass
""",
    "make devices": """
attempt("block", os.mknod, "d", stat.S_IFBLK | 0o666, os.makedev(8, 0))
attempt("character", os.mknod, "c", stat.S_IFCHR | 0o666, os.makedev(1, 1))
""",
    "type into a terminal of the user": """
import fcntl
for fd in (0, 1, 2): attempt("TIOCSTI", fcntl.ioctl, fd, 0x5412, b"x")
""",
    "trace": """
call("ptrace", 101, 117, 0x4206, os.getppid(), 0, -1); call("kcmp", 312, 272, os.getpid(), os.getpid(), 0, 0, 0)
""",
    "read another process": """
for name, x86_64, aarch64 in (("read", 310, 270), ("write", 311, 271)):
    call(name, x86_64, aarch64, os.getppid(), 0, 0, 0, 0, 0)
""",
    "take descriptors of another process": """
fd = os.pidfd_open(os.getppid()); call("pidfd_getfd", 438, 438, fd, 0, 0)
call("madvise", 440, 440, fd, 0, 0, 0, 0); call("mrelease", 448, 448, fd, 0)
""",
    "signal outside": """
for pid in HOST["pids"]:
    attempt(pid, os.kill, pid, 0); attempt(pid, os.pidfd_open, pid)
""",
    "load code into the kernel": """
call("init_module", 175, 105, 0, 0, 0); call("finit_module", 313, 273, -1, 0, 0)
call("delete_module", 176, 106, 0, 0); call("kexec", 246, 104, 0, 0, 0, -1)
""",
    "bpf": "call('bpf', 321, 280, 0, 0, 0)",
    "perf": "call('perf', 298, 241, 0, 0, -1, -1, 0)",
    "io_uring": """
call("setup", 425, 425, 1, 0); call("enter", 426, 426, -1, 0, 0, 0, 0, 0); call("register", 427, 427, -1, 0, 0, 0)
""",
    "handle its own page faults": "call('userfaultfd', 323, 282, 0)",
    "keys of the kernel": """
call("add_key", 248, 217, 0, 0, 0, 0, 0); call("request_key", 249, 218, 0, 0, 0, 0); call("keyctl", 250, 219, 0, -3, 0)
""",
    "memory without a name": "call('memfd', 319, 279, 0, 0); call('memfd_secret', 447, 447, 0)",
    "shared memory and queues of System V": """
call("shmget", 29, 194, 0, 4096, 0o600); call("msgget", 68, 186, 0, 0o600); call("mq_open", 240, 180, 0, 0)
""",
    "watch all files": "call('fanotify', 300, 262, 0, 0)",
    "change the clock": "call('settimeofday', 164, 170, 0, 0)",
    "restart or swap": """
call("reboot", 169, 142, 0, 0, 0); call("acct", 163, 89, -1)
call("swapon", 167, 224, 0, 0); call("swapoff", 168, 225, 0)
""",
    "read the kernel's log": "call('syslog', 103, 116, 3, 0, 0); call('quotactl', 179, 60, 0, 0, 0, 0)",
    "name the host": "call('sethostname', 170, 161, 0, -1); call('setdomainname', 171, 162, 0, -1)",
    "become another user": """
attempt("uid", os.setresuid, 1000, 1000, 1000); attempt("gid", os.setresgid, 1000, 1000, 1000)
attempt("groups", os.setgroups, []); attempt("chown", os.chown, ".", 1000, 1000)
""",
    "gain capabilities by a file": """
import shutil, subprocess
shutil.copy("/bin/sh", "s"); os.chmod("s", 0o6755); capability = bytes.fromhex("01000002" + "00000020" + 24 * "0")
attempt("security.capability", os.setxattr, "s", "security.capability", capability)
command = ["./s", "-c", "while read x; do echo $x; done < /proc/self/status"]
shown = subprocess.run(command, capture_output=True, text=True)
fields = dict(line.split(":", 1) for line in shown.stdout.splitlines())
if {fields[name].strip(" 0") for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} != {""}: print("some")
if (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) != ("1", "2"): print("no filter")
""",
    "raise its limits": """
for kind in ("NPROC", "DATA", "FSIZE", "NOFILE", "CORE"):
    number = getattr(resource, "RLIMIT_" + kind)
    try:
        resource.setrlimit(number, (resource.RLIM_INFINITY,) * 2); print(kind)
    except (OSError, ValueError): pass
call("prlimit", 302, 261, os.getppid(), 7, 0, 0)
""",
    "take precedence": """
attempt("nice", os.nice, -20); attempt("affinity", os.sched_setaffinity, 0, range(1024))
attempt("fifo", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)); call("setattr", 314, 274, 0, 0, 0)
call("ioprio", 251, 30, 1, 0, 0); call("setpriority", 141, 140, 0, 0, -20)
""",
    "open ever more files": """
fds = []
try:
    while len(fds) < 300: fds.append(os.open("/dev/null", os.O_RDONLY))
    print(len(fds))
except OSError: pass
""",
    "use up all inodes": "if os.statvfs('/app').f_files > 300000: print(os.statvfs('/app').f_files)",
    "leave a core file": """
if os.fork() == 0: os.kill(os.getpid(), signal.SIGSEGV)
os.wait(); time.sleep(0.05)
for path in glob.glob("core*"): print(path)
""",
    "write to control groups": """
for path in ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory.max", "/sys/kernel/uevent_helper"):
    if os.path.exists(path): print(path)
""",
    "leave files in memory outside": "for folder in HOST['folders']: put(f'{folder}/{HOST[\"name\"]}')",
    "calls of 32 bits": """
import mmap
def run(code):
    page = mmap.mmap(-1, 4096, prot=7); page.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
if machine == "x86_64":
    for code in (bytes.fromhex("b814000000cd80c3"), bytes.fromhex("b8270000400f05c3")):  # getpid by int 0x80; by x32
        pid = os.fork()
        if pid == 0: run(code); os._exit(7)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7: print(code.hex())
""",
    "connect to the node": """
for address in (("127.0.0.1", HOST["port"]), ("169.254.169.254", 80), ("1.1.1.1", 53)):
    attempt(address, connect, socket.AF_INET, address)
attempt("v6", connect, socket.AF_INET6, ("::1", HOST["port"]))
attempt("udp", connect, socket.AF_INET, ("1.1.1.1", 53), socket.SOCK_DGRAM)
""",
    "connect to sockets of files and names": """
attempt("name", connect, socket.AF_UNIX, chr(0) + HOST["name"])
attempt("file", connect, socket.AF_UNIX, HOST["home"] + "/s")
""",
    "connect to the machine below": "attempt('vsock', socket.socket, 40, socket.SOCK_STREAM)",
    "sockets of packets and rare protocols": """
attempt("raw", socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
for family in (17, 21, 29, 30, 31, 38, 39, 41, 42, 43, 44):
    for kind in (socket.SOCK_RAW, socket.SOCK_SEQPACKET): attempt(family, socket.socket, family, kind)
""",
    "make a network by netlink": """
import struct
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:  # a link of a kind that there is not
    kind = struct.pack("HH8s", 12, 1, b"no-kind\\0")
    body = struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0) + struct.pack("HH", 4 + len(kind), 18) + kind
    link.send(struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
    if -struct.unpack_from("=i", link.recv(4096), 16)[0] not in NO: print("reached")
""",
}
RUN = """
def main():
    results = {}
    for name, text in json.loads(ATTACKS).items():
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(write, 1); os.close(write); os.close(read)
                sys.stdout = open(1, "w", closefd=False)
                signal.alarm(20)
                try:
                    exec(text, dict(globals()))
                except BaseException as error:
                    print(f"broken: {error!r}")
                sys.stdout.flush()
            finally:
                os._exit(0)
        os.close(write)
        with open(read, errors="replace") as file:
            results[name] = file.read().splitlines()
        os.waitpid(pid, 0)
    print(json.dumps(results))
main()
"""


def attack_terminal() -> dict[str, list[str]]:
    """Return the successes of each attack."""
    sandbox = TerminalSandbox(TerminalLimits(cpu_s=60, waits_s=60, output_chars=100_000))
    try:
        return _attacked(sandbox)
    finally:
        sandbox.close()


def _attacked(sandbox: TerminalSandbox) -> dict[str, list[str]]:
    name = f"a{uuid.uuid4().hex}"
    with (
        tempfile.TemporaryDirectory(dir=Path.home()) as home,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        Path(home, "secret").write_text("0" * 64)
        listeners = [server]
        for address in (f"\0{name}", f"{home}/s"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen()
            listeners.append(listener)
        host = {
            "home": home,
            "port": server.getsockname()[1],
            "name": name,
            "folders": FOLDERS,
        }
        host["pids"] = [pid for pid in (os.getpid(), os.getppid()) if pid > OWN_PIDS]
        answer = sandbox.python(program(host))
        could = parse_json(answer["out"].encode(), "the answer of the attacks", SandboxError)
        for listener in listeners:
            listener.settimeout(0)
            try:
                could["connect to the node"].append(f"a connection from {listener.accept()}")
            except BlockingIOError:
                listener.close()
    left = [folder for folder in FOLDERS if Path(folder, name).exists()]
    could["leave files in memory outside"] += left
    return could


def program(host: dict) -> str:
    return f"{COMMON}\nHOST = {host!r}\nATTACKS = {json.dumps(ATTACKS)!r}\n{RUN}"
