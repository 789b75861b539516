"""Hashes of a model folder's content that are cheap at any size: a start must not read the weights twice.

Small files are hashed whole. Of a larger file: its size, its head (with the header of safetensors: names, types,
shapes), its end, and blocks at even distances. A training step changes these; a flipped byte between two blocks is not
detected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from aligner.errors import CheckpointError

WHOLE_BYTES, HEAD_BYTES = 64 << 20, 1 << 20
BLOCK_BYTES, BLOCKS = 4096, 256
PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja")


def folder_view(folder: Path) -> dict[str, str]:
    """Return file -> hash of the files of a model and its tokenizer. Raises CheckpointError."""
    paths = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    try:
        return {path.name: file_fingerprint(path) for path in paths if path.is_file()}
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error}") from error


def file_fingerprint(path: Path) -> str:
    """Return 16 hexadecimal digits for a file. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            digest.update(str(size).encode())
            digest.update(file.read(HEAD_BYTES))
            for start in _blocks(size):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _blocks(size: int) -> Iterator[int]:
    """Yield the starts of the blocks behind the head; the last one ends the file."""
    for i in range(1, BLOCKS + 1):
        yield max(HEAD_BYTES, size * i // BLOCKS - BLOCK_BYTES)


def digest(view: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits for a folder's view."""
    return hashlib.sha256(repr(sorted(view.items())).encode()).hexdigest()[:16]
