"""Terminals within containers: they work, or the node's refusal is named with its remedy."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.sandbox.refusals import explained
from aligner.sandbox.terminal import lacks
from tests.needs import lacking

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))
ASK = "from aligner.sandbox.terminal import lacks; print(lacks())"
SEALED = f"from aligner.sandbox.confine import seccomp; seccomp(terminal=True); {ASK}"
BWRAP = "bwrap --ro-bind / / --dev /dev --proc /proc"
UNSHARE = "unshare --user --map-root-user --mount"


def asked(within: str, code: str = ASK, before: str = "true", ordinary: bool = False) -> str:
    """Return the answer of a process in a container, after a command there; `ordinary`: of a user other than root."""
    python, source = sys.executable, str(ROOT)
    outside = []
    if ordinary and os.getuid() == 0:  # who may not read root's Python and sources
        python, source = f"/mnt/python/bin/{Path(os.path.realpath(sys.executable)).name}", "/mnt/source"
        binds = (
            f"mount -t tmpfs x /mnt; mkdir /mnt/python /mnt/source; mount --bind {shlex.quote(str(ROOT))} /mnt/source"
        )
        binds += f"; mount --bind {shlex.quote(sys.base_prefix)} /mnt/python"
        as_nobody = "exec setpriv --reuid 65534 --regid 65534 --clear-groups"
        outside = ["unshare", "--mount", "sh", "-c", f'{binds}; {as_nobody} "$@"', "sh"]
    command = [*outside, *shlex.split(within), "sh", "-c", f'{before}; exec "$@"', "sh", python, "-B", "-c", code]
    environ = os.environ | {"PYTHONPATH": source, "LD_LIBRARY_PATH": "/mnt/python/lib", "HOME": "/"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd="/")
    return done.stdout.strip() or done.stderr


def needs_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        lacking("there is no bwrap (package `bubblewrap`)")


def test_there_are_terminals_in_bubblewrap_for_root_and_others():
    needs_bubblewrap()
    assert asked("bwrap --dev-bind / /") == "None"
    assert asked(BWRAP, ordinary=True) == "None"
    assert asked(f"{BWRAP} --unshare-all {BWRAP} --unshare-all --cap-drop ALL", ordinary=True) == "None"


@pytest.mark.parametrize(
    ("within", "before", "code", "words"),
    [
        (UNSHARE, "mount -t tmpfs x /proc/fs", ASK, r"parts of /proc are covered, .*: /proc/fs\. .*systempaths=unconf"),
        (UNSHARE, "mount -o remount,bind,ro /proc", ASK, "/proc is read-only, or .* Mount /proc writable"),
        (
            UNSHARE,
            "echo 0 > /proc/sys/user/max_user_namespaces",
            ASK,
            "user.max_user_namespaces=0. As root: `sysctl -w",
        ),
        (
            UNSHARE,
            'echo 1 > /proc/sys/user/max_user_namespaces; exec unshare --user "$@"',
            ASK,
            "a limit on namespaces is used up.*disable-userns",
        ),
        (UNSHARE, "true", SEALED, "a filter of system calls .* is on this process. Docker"),
        (
            f"{BWRAP} --unshare-all --uid 0 --cap-drop ALL",
            "true",
            ASK,
            "this is root without the capability CAP_SETFCAP",
        ),
    ],
)
def test_what_a_node_refuses_is_named_with_its_remedy(within, before, code, words):
    if within.startswith("bwrap"):
        needs_bubblewrap()
    assert re.search(words, asked(within, code, before))


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("kernel/unprivileged_userns_clone", "0", "unshare: unshare failed: Operation not permitted", "clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "mount /proc: Permission denied", "userns=0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "unshare: write failed /proc/self/uid_map: x", "userns,"),
        ("user/max_pid_namespaces", "0", "bwrap: Creating new namespace failed", "user.max_pid_namespaces=0"),
    ],
)
def test_settings_of_other_kernels_are_named(tmp_path, name, value, error, words):
    """Such as Debian's and Ubuntu's, which this one may not have."""
    path = tmp_path / "sys" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{value}\n")
    assert words in explained(error, tmp_path)


def test_an_overlay_that_is_refused_is_named(tmp_path):
    (tmp_path / "filesystems").write_text("nodev\ttmpfs\n\text4\n")
    assert "`modprobe overlay`" in explained("mount /root: No such device", tmp_path)
    (tmp_path / "filesystems").write_text("nodev\toverlay\n")
    assert "too many overlays" in explained("mount /root: Invalid argument", tmp_path)
    assert explained("something else", tmp_path) == "something else"


def test_an_old_kernel_is_named_first(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="5.10.0-28-amd64"))
    assert "the kernel is 5.10.0-28-amd64. Linux 5.14" in explained("mount /root: Invalid argument", tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="of root alone")
def test_root_needs_a_kernel_that_bounds_its_processes(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="6.8.0-45-generic"))
    assert "root's terminals need Linux 6.14" in str(lacks())
    old = f"import os; os.uname = lambda: os.uname_result(('', '', '6.8.0', '', 'x86_64')); {ASK}"
    assert asked("unshare --user --map-root-user", old, ordinary=True) == "None"  # its root is an ordinary user
