"""Images of root file systems: a folder, or once per node unpacked: a tar file (also compressed), an OCI layout, a
squashfs or SIF file.

Unpacked ones are in the folder for temporary files, by their checksum. Device files and owners are left out: all files
belong to the user, who is root in the sandbox.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from aligner.errors import SandboxError
from aligner.foreign import read_json
from aligner.sandbox.squash import is_squash, unsquash

OPAQUE = ".wh..wh..opq"
WHITEOUT = ".wh."


def unpacked(image: str) -> str:
    """Return the folder of an image. Raises SandboxError if it cannot be read."""
    path = Path(image).resolve()
    if not path.exists():
        raise SandboxError(f"image={image!r}: expected a folder, a tar, squashfs or SIF file, or an OCI layout")
    if path.is_dir() and not (path / "oci-layout").exists():
        return str(path)
    seen = (path / "index.json" if path.is_dir() else path).stat()
    try:
        return _unpacked(path, seen.st_ctime_ns, seen.st_size)
    except (tarfile.TarError, OSError, KeyError, IndexError, TypeError, struct.error) as error:
        raise SandboxError(f"image={image!r}: {type(error).__name__}: {error}") from None


@cache
def _unpacked(path: Path, changed_ns: int, size: int) -> str:
    """Return the folder of an image, which the first process of this node reads and unpacks."""
    root, key = _store(), hashlib.sha256(f"{path} {changed_ns} {size}".encode()).hexdigest()
    known = root / f"{key}.link"
    with _locked(root, key):
        if not known.is_dir():
            known.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                known.symlink_to(_read(path, root, Path(scratch)))
    return str(known.readlink())


def _read(path: Path, root: Path, scratch: Path) -> Path:
    if path.is_file():
        digest = _digest(path)
        if is_squash(path):
            return _once(root, digest, lambda folder: unsquash(path, folder, scratch))
        if (layout := _layout_in(path, scratch)) is None:
            return _once(root, digest, lambda folder: _unpack(path, folder))
        path = layout
    (manifest,) = read_json(path / "index.json", SandboxError)["manifests"][:1]
    if "index" in manifest["mediaType"] or "list" in manifest["mediaType"]:  # of platforms
        (manifest,) = read_json(_blob(path, manifest["digest"]), SandboxError)["manifests"][:1]
    layers = read_json(_blob(path, manifest["digest"]), SandboxError)["layers"]
    blobs = [_blob(path, layer["digest"]) for layer in layers]
    digest = manifest["digest"].partition(":")[2]
    return _once(root, digest, lambda folder: [_unpack(blob, folder) for blob in blobs])


@contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _store() -> Path:
    """Return the folder of unpacked images: ours, and nobody else may write there."""
    root = Path(tempfile.gettempdir(), f"aligner-images-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    seen = root.lstat()
    if seen.st_uid != os.getuid() or seen.st_mode & 0o77 or root.is_symlink():
        raise SandboxError(f"{root}: expected a folder of this user with mode 0700, for unpacked images")
    return root


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blob(layout: Path, digest: str) -> Path:
    """Return the file of a digest, after a look whether it has it."""
    path = layout / "blobs" / "sha256" / digest.removeprefix("sha256:").replace("/", "")
    if _digest(path) != digest.removeprefix("sha256:"):
        raise SandboxError(f"{path}: expected the SHA-256 that is its name")
    return path


def _layout_in(path: Path, scratch: Path) -> Path | None:
    """Return the OCI layout that a tar file holds, as those of `docker save`; None if it holds files themselves."""
    with tarfile.open(path) as tar:
        first = tar.next()
        if first is None or first.name.split("/")[0] not in ("blobs", "oci-layout", "index.json", "manifest.json"):
            return None
        tar.extractall(scratch, filter="data")
    return scratch if (scratch / "oci-layout").exists() else None


def _once(root: Path, digest: str, unpack: Callable[[Path], object]) -> Path:
    """Unpack an image, unless another process has, also from another path."""
    folder, unfinished = root / digest, root / f"{digest}.unfinished"
    with _locked(root, digest):
        if not folder.exists():
            _remove(unfinished)
            unfinished.mkdir()
            unpack(unfinished)
            unfinished.rename(folder)
    return folder


def _unpack(layer: Path, folder: Path) -> None:
    new: set[str] = set()

    def kept(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
        parent, name = os.path.split(member.name.rstrip("/"))
        inside = Path(os.path.realpath(folder / parent))
        if not inside.is_relative_to(folder.resolve()):
            return tarfile.tar_filter(member, target)  # which refuses it
        if name == OPAQUE:
            for each in list(inside.iterdir()) if inside.is_dir() else ():
                if os.path.normpath(os.path.join(parent, each.name)) not in new:
                    _remove(each)
            return None
        if name.startswith(WHITEOUT):
            _remove(inside / name.removeprefix(WHITEOUT))
            return None
        if member.isdev():
            return None
        if not member.isdir() or (inside / name).is_symlink():
            _remove(inside / name)
        new.add(os.path.normpath(member.name))
        if member.isdir():
            member.mode |= 0o700
        return tarfile.tar_filter(member.replace(uid=None, gid=None, uname=None, gname=None, deep=False), target)

    with tarfile.open(layer) as tar:
        tar.extractall(folder, filter=kept)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            path.unlink()
