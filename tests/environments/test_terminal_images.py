"""Images of a terminal: each kind is unpacked once, and stays as it is."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from aligner.environments.terminal import Terminal
from aligner.errors import SandboxError
from aligner.sandbox.images import unpacked
from aligner.sandbox.terminal import lacks
from tests.needs import lacking

pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))


def opened(row: dict | None = None, **args) -> Terminal:
    made = Terminal(**args)
    made.reset(7, **{"tests": "true"} | (row or {}))
    return made


NEEDED = ("bash", "grep", "cat", "mkdir", "rm", "cp", "chmod", "test", "ls")


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    return make_root(tmp_path_factory.mktemp("image") / "root")


def make_root(root: Path) -> Path:
    """Make a root file system of a few programs."""
    for name in NEEDED:
        program = shutil.which(name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [program, *re.findall(r"(/\S+) \(", listed)]:
            target = root / (f"usr/bin/{name}" if path == program else path.lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), target)
    (root / "bin").symlink_to("usr/bin")
    return root


def layout(folder: Path, *layers: Path) -> Path:
    """Write an OCI layout of these tar files."""

    def blob(data: bytes) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (folder / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (folder / "blobs/sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": "application/vnd.oci.image.manifest"}

    manifest = blob(json.dumps({"layers": [blob(layer.read_bytes()) for layer in layers]}).encode())
    (folder / "oci-layout").write_text("{}")
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    return folder


def tar(path: Path, members: dict[str, str | bytes]) -> Path:
    """Write a tar file of texts, and of links (by a text that begins with an arrow)."""
    with tarfile.open(path, "w") as file:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            data = text.encode() if isinstance(text, str) else text
            if data.startswith(b"->"):
                info.type, info.linkname, data = tarfile.SYMTYPE, data[2:].decode(), b""
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def test_an_image_is_unpacked_once_and_stays_as_it_is(image, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tarfile.open(tmp_path / "root.tar", "w") as file:
        file.add(image, ".")
    first = tar(tmp_path / "1.tar", {"d/a": "1", "d/b": "2", "e/c": "3", "link": "->/d"})
    second = tar(tmp_path / "2.tar", {"d/.wh.a": "", "e/.wh..wh..opq": "", "e/x": "4", "link": "5"})
    oci = layout(tmp_path / "oci", tmp_path / "root.tar", first, second)
    with tarfile.open(tmp_path / "saved.tar", "w") as file:
        for path in sorted(oci.iterdir()):
            file.add(path, path.name)
    squashed = [squashfs(tmp_path, image)] if shutil.which("mksquashfs") else []
    squashed += [sif(tmp_path / "root.sif", path) for path in squashed]
    for kind in (image, tmp_path / "root.tar", oci, tmp_path / "saved.tar", *squashed):
        made = opened({"tests": "grep -q new /app/f"}, image=str(kind))
        made.bash("rm -rf /d /usr/bin/chmod; echo x > /usr/bin/cat; echo x > /new")
        assert "python3" in made.python("1")  # it has none
        made = opened({"tests": "grep -q new /app/f"}, image=str(kind))
        made.bash("echo new > f; for p in grep bash; do rm /usr/bin/$p; cp /usr/bin/ls /usr/bin/$p; done; rm -r /bin")
        assert made.get_reward() == 1.0, kind
    made = opened(image=str(oci))
    assert made.bash("ls /d /e; cat /link") == "/d:\nb\n\n/e:\nx\n5"
    store = tmp_path / f"aligner-images-{os.getuid()}"
    assert len([one for one in store.iterdir() if one.is_dir() and not one.is_symlink()]) == 2 + len(squashed)
    made = opened({"tests": "grep -q three a.txt"}, image=str(image))
    made.bash("for p in grep bash; do rm /usr/bin/$p; cp /usr/bin/test /usr/bin/$p; done; echo /x > /etc/ld.so.preload")
    assert made.get_reward() == 0.0
    assert (
        (image / "usr/bin/chmod").exists()
        and (image / "usr/bin/cat").stat().st_size > 99
        and not (image / "new").exists()
    )


@pytest.mark.parametrize(
    ("members", "words"),
    [({"../out": "x"}, "out"), ({"a": "->/tmp", "a/out": "x"}, "out")],
)
def test_no_image_writes_beside_its_folder(tmp_path, members, words):
    with pytest.raises(SandboxError, match=words):
        unpacked(str(tar(tmp_path / "bad.tar", members)))


def test_no_squashfs_writes_beside_its_folder(tmp_path, monkeypatch):
    """Its names are checked by `unsquashfs`, since 4.5.1 and in the distributions' earlier ones."""
    if shutil.which("mksquashfs") is None:
        lacking("there is no mksquashfs (package `squashfs-tools`)")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "root").mkdir()
    (tmp_path / "root/AAAoutside").write_text("x")
    packed = squashfs(tmp_path, tmp_path / "root", "-noI", "-noD", "-noF", "-noX")
    data = packed.read_bytes()
    assert data.count(b"AAAoutside") == 1
    packed.write_bytes(data.replace(b"AAAoutside", b"../outside"))
    with pytest.raises(SandboxError, match="unsquashfs"):
        unpacked(str(packed))
    assert not list(tmp_path.rglob("outside"))


SPECIAL = (
    "dev/null c 666 0 0 1 3",
    "etc/shadow f 600 33 33 echo secret",
    "etc/locked d 500 33 33",
    "su f 4755 0 0 true",
)


def squashfs(folder: Path, root: Path, *options: str) -> Path:
    """Make a squashfs file, also of files that only root can make."""
    command = ["mksquashfs", str(root), str(folder / "root.sqsh"), "-noappend", "-no-progress", "-quiet", *options]
    command += ["-p", "dev d 755 0 0", "-p", "etc d 755 0 0"]
    subprocess.run([*command, *(word for each in SPECIAL for word in ("-p", each))], check=True, capture_output=True)
    return folder / "root.sqsh"


def sif(path: Path, content: Path, system: int = 1, kind: int = 2) -> Path:
    """Write a SIF file by the format's description: its first object is a definition, the next one unused."""

    def descriptor(data_type: int, used: bool, offset: int, size: int, extra: bytes = b"") -> bytes:
        common = struct.pack("<i?IIIqqq", data_type, used, 1, 0xF0000001, 0, offset, size, size)
        return common + bytes(8 * 4) + b"name".ljust(128, b"\0") + extra.ljust(384, b"\0")

    data, partition = content.read_bytes(), struct.pack("<ii3s", system, kind, b"02\0")
    table = descriptor(0x4001, True, 32768, 9) + descriptor(0x4004, False, 1, 1, partition)
    table += descriptor(0x4004, True, 36864, len(data), struct.pack("<ii3s", 1, 3, b"02\0"))  # an overlay of data
    table += descriptor(0x4004, True, 36864, len(data), partition)
    header = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(16)
    header += struct.pack("<8q", 7, 8, 44, 48, 4096, len(table), 32768, 4096 + len(data))
    path.write_bytes(header.ljust(4096, b"\0") + table.ljust(28672, b"\0") + b"from: us\n".ljust(4096, b"\0") + data)
    return path


def test_images_of_clusters_are_the_users_own_and_read_once_by_a_node(image, tmp_path, monkeypatch):
    """Two processes of a node run `unsquashfs` once."""
    if shutil.which("mksquashfs") is None:
        lacking("there is no mksquashfs (package `squashfs-tools`)")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    packed = sif(tmp_path / "root.sif", squashfs(tmp_path, image))
    (tmp_path / "bin").mkdir()
    counter = tmp_path / "bin/unsquashfs"
    counter.write_text(f'#!/bin/sh\necho x >> {tmp_path}/runs\nsleep 0.2\nexec {shutil.which("unsquashfs")} "$@"\n')
    counter.chmod(0o755)
    monkeypatch.setenv("PATH", f"{counter.parent}:{os.environ['PATH']}")
    code = f"from aligner.sandbox.images import unpacked; print(unpacked({str(packed)!r}), end='')"
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {rank.communicate()[0] for rank in ranks}
    assert len(folders) == 1 and (tmp_path / "runs").read_text() == "x\n"
    root = Path(folders.pop())
    assert (root / "etc/shadow").read_text() == "secret\n" and (root / "usr/bin/bash").exists()
    assert not (root / "dev/null").exists() and not (root / "su").stat().st_mode & stat.S_ISUID
    assert all(path.lstat().st_uid == os.getuid() for path in root.rglob("*"))


def test_an_image_of_a_cluster_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "root.sqsh"
    file.write_bytes(b"hsqs" + bytes(99))
    for path, words in (
        (file, "unsquashfs .*root.sqsh: "),
        (sif(tmp_path / "1.sif", file, system=5), "expected a partition of squashfs, found encrypted squashfs"),
        (sif(tmp_path / "2.sif", file, kind=3), "expected a SIF file with a primary partition, found none"),
    ):
        with pytest.raises(SandboxError, match=words):
            unpacked(str(path))
    packed = sif(tmp_path / "3.sif", file)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(SandboxError, match="its partition ends 9 bytes early"):
        unpacked(str(packed))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxError, match=r"root.sqsh: there is no `unsquashfs` in PATH \(package `squashfs-tools`\)"):
        unpacked(str(file))
