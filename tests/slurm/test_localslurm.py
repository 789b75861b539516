"""A cluster's folder that somebody else could write is not used: its daemons execute what lies there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "slurm/localslurm")


def refused(command: str, folder: Path) -> str:
    done = subprocess.run([SCRIPT, command, "--root", str(folder)], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, (command, done)
    return done.stderr


def foreign(folder: Path) -> Path:
    """With the files that a cluster has, its key among them."""
    for name in ("munge", "etc"):
        (folder / name).mkdir(parents=True)
    (folder / "munge/munge.key").write_bytes(b"known" * 100)
    (folder / "etc/slurm.conf").write_text("Prolog=/tmp/mine\n")
    return folder


@pytest.mark.parametrize("command", ["up", "env", "status", "down"])
def test_a_folder_that_others_can_write_is_refused(tmp_path, command):
    folder = foreign(tmp_path / "cluster")
    folder.chmod(0o777)
    assert "expected a folder of" in refused(command, folder) and (folder / "munge/munge.key").exists()
    folder.chmod(0o755)
    assert "mode 700, found directory of" in refused(command, folder)


def test_a_link_is_refused(tmp_path):
    folder = foreign(tmp_path / "cluster")
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    assert "found a link" in refused("up", tmp_path / "link")
    assert "found a link" in refused("env", Path(f"{tmp_path}/link/"))


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder away")
@pytest.mark.parametrize("command", ["up", "env"])
def test_somebody_elses_folder_is_refused(tmp_path, command):
    folder = foreign(tmp_path / "cluster")
    folder.chmod(0o700)
    os.chown(folder, 65534, 65534)
    assert "of nobody, mode 700" in refused(command, folder)
