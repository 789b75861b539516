"""Files that are written whole or not at all, and flushed to the disk on request; and the folder of the package's
own files."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any, Self

from aligner.errors import ConfigError


def conf_dir() -> Path:
    """Return the folder of the project's own config files: beside the package, or as installed."""
    candidates = [
        Path(__file__).resolve().parents[1] / "conf",
        Path(sys.prefix) / "share/aligner/conf",
        Path(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))) / "share/aligner/conf",
    ]
    for folder in candidates:
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("conf", str(candidates[0]), "the folder with aligner's config files", "Reinstall aligner.")


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, text: str, durable: bool = True) -> None:
    """Write a file: another process sees the old text or the new one, never a mixture. If `durable`, that holds
    after a power cut too. Raises OSError."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    aside.replace(path)


def fsync_tree(folder: Path) -> None:
    """Flush every file and directory below `folder`, so that a rename that follows is durable."""
    for root, _, files in os.walk(folder):
        for name in files:
            fsync_file(os.path.join(root, name))
        fsync_folder(Path(root))


def fsync_file(path: str | Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Flush a directory's entries (a rename in it)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class HashedFile:
    """A context manager for a file that is written beside `path`, flushed to the disk and renamed when left without
    an error; `sha256` is known then. Raises OSError."""

    def __init__(self, path: Path):
        self.path, self.sha256, self.bytes = path, "", 0
        self._aside, self._hash = path.with_name(path.name + ".tmp"), hashlib.sha256()

    def __enter__(self) -> Self:
        self._file = self._aside.open("wb")
        return self

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        self._hash.update(data)
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        self._file.flush()

    def __exit__(self, kind: Any, *unused: Any) -> None:
        if kind is not None:
            self._file.close()
            return
        self.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.rename(self.path)
        self.sha256 = self._hash.hexdigest()
