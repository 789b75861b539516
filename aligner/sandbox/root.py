"""The file system of a terminal: an image, and changes over it in memory. Runs in the sandbox's first process.

    /image     the image, or a frame for parts of this machine, read-only
    /rw        the changes, of a limited size
    /readable  further paths of this machine, read-only
    /root      all of it, with /proc and /dev: all that the programs of the terminal see

Imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from fcntl import ioctl

from confine import MS_BIND, MS_REC, mount

# folders that tests take from the image, whatever was changed there
SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "logs", "proc", "run", "sbin", "sys")
SYSTEM += ("tests", "usr")
DEVICES = ("null", "zero", "full", "random", "urandom")
MASKED = ("kcore", "keys", "key-users", "kmsg", "kallsyms", "sched_debug", "slabinfo", "timer_list", "vmallocinfo")
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MNT_DETACH = 1, 2, 4, 8, 2
MOUNT_SETATTR, AT_RECURSIVE, READ_ONLY, PIVOT_ROOT = 442, 0x8000, 7, {"x86_64": 155, "aarch64": 41}
INODES = 200_000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _done(what: str, code: int) -> None:
    if code < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


class RootFolder:
    """The file system at `path`. It leaves no way to the files of this machine but those in `paths` of the job."""

    def __init__(self, image: str, paths: list[str], disk_bytes: int, readable: list[str]):
        base, self.path, self.paths, self._composed = "/proc", "/root", [] if image else paths, 0
        mount("tmpfs", base, "tmpfs", MS_NOSUID, "size=1m,mode=755")
        for name in ("image", "rw", "root", "proc", "dev", "old", "readable"):
            os.mkdir(f"{base}/{name}")
        mount("tmpfs", f"{base}/rw", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes={INODES},mode=755")
        for name in ("changes", "removed", "shm"):
            os.mkdir(f"{base}/rw/{name}")
        if image:
            mount(image, f"{base}/image", None, MS_BIND | MS_REC)
            _read_only(f"{base}/image")
        else:
            _frame(f"{base}/image", paths)
        for i, path in enumerate(readable):
            _point(f"{base}/readable/{i}", os.path.isdir(path))
            mount(path, f"{base}/readable/{i}", None, MS_BIND | MS_REC)
            _read_only(f"{base}/readable/{i}")
        _devices(f"{base}/dev")
        mount(f"{base}/rw/shm", f"{base}/dev/shm", None, MS_BIND)
        mount("proc", f"{base}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.chdir(base)
        _done("pivot_root", _libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"old"))
        os.chdir("/")
        _done("umount", _libc.umount2(b"/old", MNT_DETACH))
        self.compose()
        for i, path in enumerate(readable):  # not after `renew`: a program could put a link in its way
            _point(self.path + path, os.path.isdir(f"/readable/{i}"))
            mount(f"/readable/{i}", self.path + path, None, MS_BIND | MS_REC)
        for name in ("tmp", "root", "run", "logs"):  # before any program could put a link there
            os.makedirs(f"{self.path}/{name}", exist_ok=True)

    def compose(self) -> None:
        """Mount the image with the changes."""
        work = f"/rw/work{self._composed}"
        os.mkdir(work)
        self._composed += 1
        options = f"userxattr,lowerdir=/image,upperdir=/rw/changes,workdir={work}"
        mount("overlay", self.path, "overlay", MS_NOSUID | MS_NODEV, options)
        for path in self.paths:
            mount(f"/image{path}", self.path + path, None, MS_BIND | MS_REC)
        for name in ("proc", "dev"):
            os.makedirs(f"{self.path}/{name}", exist_ok=True)
        # some files of /proc/sys ask for the user alone, who may be this machine's root: nobody writes there
        mount("proc", f"{self.path}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, "hidepid=4")
        for name in MASKED:  # that show this machine, to its root above all
            if os.path.exists(f"{self.path}/proc/{name}"):
                mount("/dev/null", f"{self.path}/proc/{name}", None, MS_BIND)
        mount("/dev", f"{self.path}/dev", None, MS_BIND | MS_REC)

    def renew(self) -> None:
        """Mount it anew, with the system's folders as in the image. No process may be left in it."""
        _done("umount", _libc.umount2(self.path.encode(), MNT_DETACH))
        for name in SYSTEM:
            if os.path.lexists(f"/rw/changes/{name}"):
                os.rename(f"/rw/changes/{name}", f"/rw/removed/{name}")
        os.rename("/rw/shm", "/rw/removed/shm")
        os.mkdir("/rw/shm")
        _done("umount", _libc.umount2(b"/dev/shm", MNT_DETACH))
        mount("/rw/shm", "/dev/shm", None, MS_BIND)
        os.chmod("/rw/changes", 0o755)
        self.compose()


def _frame(folder: str, paths: list[str]) -> None:
    """Make a folder with these paths of this machine, and the files that programs expect."""
    for path in paths:
        target = folder + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
        else:
            _point(target, os.path.isdir(path))
    paths[:] = [path for path in paths if not os.path.islink(path)]
    for path in paths:
        mount(path, folder + path, None, MS_BIND | MS_REC)
        _read_only(folder + path)
    os.makedirs(f"{folder}/etc", exist_ok=True)
    for name, text in ETC.items():
        with open(f"{folder}/etc/{name}", "w") as file:
            file.write(text)
    for name in ("tmp", "root", "run", "logs", "tests", "proc", "dev", "var", "home", "opt"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)


def _point(path: str, folder: bool) -> None:
    """Make a folder or a file on which another can be mounted."""
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder and not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT))


def _devices(folder: str) -> None:
    for name in DEVICES:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT))
        mount(f"/dev/{name}", f"{folder}/{name}", None, MS_BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{folder}/{name}")
    os.mkdir(f"{folder}/shm")


def _read_only(folder: str) -> None:
    """Let nothing below be written, nor its set-user-id and device files count."""
    attributes = struct.pack("=QQQQ", READ_ONLY, 0, 0, 0)
    code = _libc.syscall(MOUNT_SETATTR, -100, folder.encode(), AT_RECURSIVE, attributes, len(attributes))
    _done(f"mount_setattr {folder}", code)


def raise_loopback() -> None:
    """Let programs of the terminal reach each other, and nobody else, by the network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def hand_out(ports: list[int], bridge: int) -> None:
    """Make listening sockets on the loopback, and give them to the host, who answers there."""
    listeners = [socket.create_server(("127.0.0.1", port)) for port in ports]
    with socket.socket(fileno=bridge) as host:
        socket.send_fds(host, [b"l"], [each.fileno() for each in listeners])
    for each in listeners:
        each.close()


def name_host(name: str) -> None:
    _done("sethostname", _libc.sethostname(name.encode(), len(name)))
