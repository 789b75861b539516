"""What a node packs, and makes of an archive: a whole copy, or none."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

PACK, UNPACK = (Path(__file__).parents[2] / f"launchers/{name}.sh" for name in ("pack", "unpack"))


def unpack(*arguments: object) -> tuple[int, str]:
    done = subprocess.run([UNPACK, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture
def archive(tmp_path):
    """Of two files; `local` does not exist yet."""
    (tmp_path / "from/inner").mkdir(parents=True)
    for name, size in (("a", 5000), ("inner/b", 70000)):
        (tmp_path / "from" / name).write_bytes(b"x" * size)
    (tmp_path / "local").mkdir(mode=0o700)
    path = tmp_path / "local/copy-2.7.tar"
    subprocess.run(["tar", "-cf", path, "-C", tmp_path / "from", "a", "inner"], check=True)
    return path


def test_a_whole_archive_becomes_the_copy_once(archive):
    copy = archive.parent / "copy-2"
    assert unpack(copy)[0] == 1  # not there yet
    assert unpack(copy, archive) == (0, "")
    assert (copy / "inner/b").stat().st_size == 70000 and list(archive.parent.iterdir()) == [copy]
    (copy / "a").write_text("kept")
    assert unpack(copy)[0] == 0 and unpack(copy, archive)[0] == 0  # of a node that was second: all is gone
    assert (copy / "a").read_text() == "kept"


def test_a_copy_that_has_lost_files_is_made_anew(archive):
    """As what cleans /tmp leaves it; modules that were compiled in it do not count."""
    copy = archive.parent / "copy-2"
    (copy / "__pycache__").mkdir(parents=True)
    for name in ("a", "__pycache__/a.pyc"):
        (copy / name).touch()
    assert unpack(copy)[0] == 1
    assert unpack(copy, archive) == (0, "")
    assert (copy / "inner/b").stat().st_size == 70000 and list(archive.parent.iterdir()) == [copy]
    assert unpack(copy)[0] == 0


@pytest.mark.parametrize("kept", [0, 700, 6144, 40000])
def test_an_archive_that_ends_early_becomes_none(archive, kept):
    """6144: between two files, where tar sees nothing wrong."""
    archive.write_bytes(archive.read_bytes()[:kept])
    code, output = unpack(archive.parent / "copy-2", archive)
    assert code == 1 and (f"{archive} lacks files" in output) == (kept == 6144) and output
    assert not list(archive.parent.iterdir())


def test_what_cannot_be_unpacked_becomes_none(archive):
    archive.write_bytes(b"no archive" * 1000)
    code, output = unpack(archive.parent / "copy-2", archive)
    assert code == 1 and "tar" in output and not list(archive.parent.iterdir())


@pytest.mark.parametrize("open_as", ["mode", "link"])
def test_no_copy_is_taken_from_where_others_could_change_it(archive, open_as):
    """A link in /tmp is its owner's to point elsewhere, after it was looked at."""
    home = archive.parent
    assert unpack(home / "copy-2", archive)[0] == 0
    if open_as == "mode":
        home.chmod(0o777)
    else:
        home = home.parent / "link"
        home.symlink_to(archive.parent)
    code, output = unpack(f"{home}//copy-2")
    assert code == 1 and f"{home} is a link, another user's, or open to all" in output


@pytest.mark.parametrize("works", [True, False])
def test_the_first_node_packs_and_keeps_no_archive_of_its_own(tmp_path, works):
    """What is read-only where it comes from can be removed where it is a copy."""
    (tmp_path / "from").mkdir()
    (tmp_path / "from/a").write_text("x")
    (tmp_path / "from/a").chmod(0o444)
    (tmp_path / "local").mkdir()
    sbcast = tmp_path / "sbcast"
    sbcast.write_text('#!/bin/sh\necho "$2" >"$0.asked"\n' + ('cp "$3" "$4"\n' if works else "exit 1\n"))
    sbcast.chmod(0o755)
    archive = tmp_path / "local/copy-1.7.tar"
    step = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}
    command = [PACK, archive, tmp_path / "from", "."]
    assert subprocess.run(command, env=step | {"SLURM_PROCID": "1"}).returncode == 0 and not any(
        archive.parent.iterdir()
    )
    assert subprocess.run(command, env=step | {"SLURM_PROCID": "0"}).returncode == (0 if works else 1)
    assert (tmp_path / "sbcast.asked").read_text() == "--jobid=7.3\n"
    assert list(archive.parent.iterdir()) == ([archive] if works else [])
    if works:
        archive.parent.chmod(0o700)
        assert unpack(archive.parent / "copy-1", archive) == (0, "")
        assert (archive.parent / "copy-1/a").stat().st_mode & stat.S_IWUSR
