"""Why a machine refuses the namespaces and mounts of a sandbox, and what its administrator or a container can change.

Sources: user_namespaces(7), namespaces(7), mount_too_revealing() in Linux' fs/namespace.c, map_write() in its
kernel/user_namespace.c, Debian's kernel.unprivileged_userns_clone, Ubuntu's AppArmor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KINDS = ("user", "mnt", "pid", "net", "ipc", "uts")
# where a kernel lets others mount, without hiding anything
EMPTY = ("/proc/sys/fs/binfmt_misc", "/proc/fs/nfsd")
NAMESPACE = "unshare failed|new namespace"
MAP = r"uid_map|uid map"
MOUNT = r"mount \S+: (Operation not|Permission)"
UNMASK = (
    "Docker: `--security-opt systempaths=unconfined`. Podman: `--security-opt unmask=ALL`. Kubernetes: "
    "`procMount: Unmasked`. bubblewrap as root: `--bind /proc /proc` for `--proc /proc`"
)


@dataclass(frozen=True)
class Refusal:
    """A cause of an error, if `cause` returns its words from the folder /proc."""

    error: str  # a pattern
    cause: Callable[[Path], str]
    remedy: str


def _value(proc: Path, name: str) -> str:
    try:
        return (proc / "sys" / name.replace(".", "/")).read_text().strip()
    except OSError:
        return ""


def _is(name: str, value: str) -> Callable[[Path], str]:
    return lambda proc: f"{name}={value}" if _value(proc, name) == value else ""


def _old(proc: Path) -> str:
    release = os.uname().release
    return f"the kernel is {release}" if kernel() < (5, 14) else ""


def _none_allowed(proc: Path) -> str:
    zeros = [f"user.max_{kind}_namespaces=0" for kind in KINDS if _value(proc, f"user.max_{kind}_namespaces") == "0"]
    return ", ".join(zeros)


def _filtered(proc: Path) -> str:
    """Return whether a table of system calls is in force here."""
    status = (proc / "self/status").read_text()
    return "a filter of system calls (seccomp) is on this process" if re.search(r"^Seccomp:\s+2", status, re.M) else ""


def _covered(proc: Path) -> str:
    """Return what lies over parts of /proc."""
    mounts = [line.split()[4] for line in (proc / "self/mountinfo").read_text().splitlines()]
    covers = sorted({path for path in mounts if path.startswith("/proc/")} - {*EMPTY})
    return f"parts of /proc are covered, as in many containers: {', '.join(covers)}" if covers else ""


def _root_of_container(proc: Path) -> str:
    """Return whether uid 0 lacks the capability that lets it be mapped again (CAP_SETFCAP, bit 31)."""
    capabilities = re.search(r"^CapEff:\s+(\w+)", (proc / "self/status").read_text(), re.M)
    lacks = os.getuid() == 0 and capabilities is not None and not int(capabilities[1], 16) >> 31 & 1
    return "this is root without the capability CAP_SETFCAP" if lacks else ""


def _no_overlay(proc: Path) -> str:
    known = (proc / "filesystems").read_text().split()
    return "" if "overlay" in known else "the kernel has no overlayfs"


def _always(text: str) -> Callable[[Path], str]:
    return lambda proc: text


# the first whose pattern and cause hold
REFUSALS = (
    Refusal(".", _old, "Linux 5.14 or later is needed"),
    Refusal(NAMESPACE, _none_allowed, "As root: `sysctl -w user.max_user_namespaces=15000`, and so for the others"),
    Refusal(
        "No space left on device",
        _always("a limit on namespaces is used up, here or in a container around, or more than 32 are nested"),
        "As root: raise `user.max_user_namespaces`. bubblewrap: leave out `--disable-userns`",
    ),
    Refusal(
        f"{NAMESPACE}|{MAP}",
        _is("kernel.unprivileged_userns_clone", "0"),
        "As root: `sysctl -w kernel.unprivileged_userns_clone=1`",
    ),
    Refusal(
        f"{NAMESPACE}|{MAP}|{MOUNT}",
        _is("kernel.apparmor_restrict_unprivileged_userns", "1"),
        "As root: `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, or a profile of AppArmor with `userns,`",
    ),
    Refusal(NAMESPACE, _filtered, "Docker, Podman: `--security-opt seccomp=unconfined`, or a profile with `unshare`"),
    Refusal(
        NAMESPACE,
        _always("the process lives in a chroot, or a security module forbids user namespaces"),
        "Use a container with a root of its own (pivot_root), or ask who administers the node",
    ),
    Refusal(MAP, _root_of_container, "Run as an ordinary user, or keep this capability"),
    Refusal(MAP, _always("/proc is read-only, or a security module forbids it"), "Mount /proc writable"),
    Refusal("mount /proc/proc: Operation not permitted", _covered, f"Run as an ordinary user, or unmask. {UNMASK}"),
    Refusal("mount /root: ", _no_overlay, "As root: `modprobe overlay`"),
    Refusal(
        "mount /root: Invalid argument",
        _always("the image lies on too many overlays"),
        "Put it, or TMPDIR, on a file system that is none",
    ),
    Refusal(
        f"{MOUNT}",
        _always("a security module (AppArmor, SELinux) forbids mounts"),
        "Docker: `--security-opt apparmor=unconfined`",
    ),
    Refusal("unrecognized option", _always("unshare is older than 2.32"), "Update `util-linux`"),
)


def kernel() -> tuple[int, ...]:
    return tuple(map(int, os.uname().release.split(".")[:2]))


def explained(error: str, proc: Path = Path("/proc")) -> str:
    """Return an error of a sandbox with its cause and remedy, as far as they are known."""
    for refusal in REFUSALS:
        if re.search(refusal.error, error) and (cause := refusal.cause(proc)):
            return f"{error}: {cause}. {refusal.remedy}"
    return error
