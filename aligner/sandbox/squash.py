"""Images of clusters: squashfs files (enroot, pyxis), and SIF files (Apptainer, Singularity), which hold one.

SIF: a header, then descriptors at an offset that it has (apptainer/sif, pkg/sif/sif.go and descriptor.go), packed and
little-endian. Read by `unsquashfs`, without a mount.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path
from typing import BinaryIO

from aligner.errors import SandboxError

SQUASHFS, SIF = b"hsqs", b"SIF_MAGIC\0"
LAUNCH_BYTES = 32  # of the line that makes a SIF file a program
HEADER = struct.Struct("<32s10s3s3s16s8q")  # total number and offset of descriptors: the fourth and fifth of the eight
DESCRIPTOR = struct.Struct("<i?III3q4q128s384s")
PARTITION, PRIMARY = 0x4004, 2  # data type; role of a partition
KINDS = {1: "squashfs", 2: "ext3", 3: "an archive", 4: "raw data", 5: "encrypted squashfs"}
MOST_DESCRIPTORS = 10_000
SPECIAL = 2  # its exit status if it made all but device files and owners
COPY_BYTES = 16 << 20


def is_squash(path: Path) -> bool:
    """Return whether a file is a squashfs or SIF image."""
    with path.open("rb") as file:
        begin = file.read(LAUNCH_BYTES + len(SIF))
    return begin.startswith(SQUASHFS) or begin[LAUNCH_BYTES:] == SIF


def unsquash(path: Path, folder: Path, scratch: Path) -> None:
    """Unpack an image into an empty folder. Raises SandboxError if `unsquashfs` is missing or fails."""
    program = shutil.which("unsquashfs")
    if program is None:
        raise SandboxError(f"{path}: there is no `unsquashfs` in PATH (package `squashfs-tools`)")
    with path.open("rb") as file:
        if file.read(len(SQUASHFS)) != SQUASHFS:
            path = _partition(path, scratch / "squashfs")  # early versions have no option for an offset
    command = [program, "-no-progress", "-no-xattrs", "-force", "-dest", str(folder), str(path)]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, cwd=scratch)
    _own(folder)
    if done.returncode not in (0, SPECIAL):
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise SandboxError(f"unsquashfs {path}: {lines[-1] if lines else f'exit status {done.returncode}'}")


def _partition(path: Path, target: Path) -> Path:
    """Copy the file system out of a SIF file."""
    with path.open("rb") as file, target.open("wb") as copy:
        begin, size = _extent(path, file)
        file.seek(begin)
        while size > 0 and (piece := file.read(min(size, COPY_BYTES))):
            size -= copy.write(piece)
    if size:
        raise SandboxError(f"{path}: its partition ends {size} bytes early")
    return target


def _extent(path: Path, file: BinaryIO) -> tuple[int, int]:
    """Return offset and size of the file system in a SIF file."""
    file.seek(0)
    *_, total, offset, _, _, _ = HEADER.unpack(file.read(HEADER.size))
    file.seek(offset)
    table = file.read(DESCRIPTOR.size * max(0, min(total, MOST_DESCRIPTORS)))
    for kind, used, _, _, _, begin, size, *_, extra in DESCRIPTOR.iter_unpack(table):
        system, role = struct.unpack_from("<ii", extra)
        if used and (kind, role) == (PARTITION, PRIMARY):
            if KINDS.get(system) != "squashfs":
                raise SandboxError(f"{path}: expected a partition of squashfs, found {KINDS.get(system, system)}")
            return begin, size
    raise SandboxError(f"{path}: expected a SIF file with a primary partition, found none")


def _own(folder: Path) -> None:
    """Let all files be this user's, as those of tar files: no device files, no set-user-id bits, open folders."""
    os.chmod(folder, 0o755)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            mode = os.lstat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                os.unlink(path)
                continue
            os.chown(path, os.getuid(), os.getgid(), follow_symlinks=False)
            if not stat.S_ISLNK(mode):
                os.chmod(path, stat.S_IMODE(mode) & 0o755 | (0o700 if stat.S_ISDIR(mode) else 0o400))
