"""Files of a run folder that somebody else may have made: only files that lie in it, and no more bytes than
expected."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

CONFIG_BYTES = 256 << 10  # of config.yaml, which has some 30 KB
TAIL_BYTES = 4000  # of a log
FILE_BYTES = 16 << 20  # of a file that is read whole


def opened(folder: Path, name: str) -> BinaryIO:
    """Open a file. Raises OSError; also for a link that leads out of the folder, and for anything but a regular file,
    as reading a pipe would block."""
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{os.path.realpath(folder)}/"):
            raise OSError(errno.ELOOP, "a link out of the run folder, which is not followed")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def content(folder: Path, name: str, most: int = FILE_BYTES) -> bytes:
    """Read a file. Raises OSError, also for a file of more bytes than `most`."""
    with opened(folder, name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"expected at most {most} bytes")
    return data


def end(file: BinaryIO) -> str:
    """Return the end of a log."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
    return file.read(TAIL_BYTES).decode(errors="replace")


def within(folder: Path, name: str) -> bool:
    """Return whether a file or folder exists and lies in `folder`."""
    path = os.path.realpath(folder / name)
    return path.startswith(f"{os.path.realpath(folder)}/") and os.path.exists(path)
