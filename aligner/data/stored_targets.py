"""A teacher's k largest logprobs of each token of a dataset's answers, and their ids, in files.

<store>/<key>/manifest.json              everything that the logprobs depend on; the key is its hash
<store>/<key>/rows-00000128.safetensors  rows from this number on: logprobs float32 [n, k], descending, and ids
                                         int32 [n, k] of the n tokens in their loss masks
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from aligner.data.items import SftItem

BLOCK = 128  # rows of a file
MANIFEST = "manifest.json"


def offsets(dataset: Sequence[SftItem]) -> np.ndarray:
    """Return int64 [rows + 1]: index of each row's first token among those in loss masks of all rows."""
    counts = [int(item.loss_mask.sum()) for item in (dataset[i] for i in range(len(dataset)))]
    return np.concatenate([[0], counts]).cumsum().astype(np.int64)


def digest(dataset: Sequence[SftItem]) -> str:
    """Return a hash of all tokens and their loss masks."""
    sha256 = hashlib.sha256()
    for item in (dataset[i] for i in range(len(dataset))):
        sha256.update(np.int64(len(item.tokens)).tobytes() + item.tokens.tobytes() + item.loss_mask.tobytes())
    return sha256.hexdigest()[:16]


def key_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def manifests(store: Path) -> dict[Path, dict[str, Any]]:
    """Return folder -> manifest, for all manifests that match their folder's name."""
    valid = {}
    for file in sorted(store.glob(f"*/{MANIFEST}")):
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # incomplete: its files are unusable
            continue
        if isinstance(manifest, dict) and key_of(manifest) == file.parent.name:
            valid[file.parent] = manifest
    return valid


class StoredTargets(Sequence):
    """A dataset with its teacher's targets, read from `folder` on access."""

    def __init__(self, dataset: Any, folder: Path, top_k: int):
        self.dataset, self.folder, self.top_k, self.report = dataset, folder, top_k, dataset.report
        self.offsets = offsets(dataset)
        self._open = lru_cache(64)(self._file)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> SftItem:
        first = index // BLOCK * BLOCK
        low, high = self.offsets[index : index + 2] - self.offsets[first]
        content = self._open(first)
        targets = (content.get_slice(name)[int(low) : int(high)] for name in ("logprobs", "ids"))
        return self.dataset[index]._replace(teacher=tuple(targets))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per row."""
        return self.dataset.lengths

    @property
    def blocks(self) -> range:
        """The first row of each file."""
        return range(0, len(self), BLOCK)

    def rows(self, first: int) -> range:
        """Return the rows of the file that begins with row `first`."""
        return range(first, min(first + BLOCK, len(self)))

    def missing(self) -> list[int]:
        """Return first rows of files that are missing, incomplete or of another key."""
        return [first for first in self.blocks if not self._whole(first)]

    def path(self, first: int) -> Path:
        """Return the path of the file that begins with row `first`."""
        return self.folder / f"rows-{first:08d}.safetensors"

    def _shape(self, first: int) -> tuple[int, int]:
        return int(self.offsets[self.rows(first).stop] - self.offsets[first]), self.top_k

    def _file(self, first: int) -> Any:
        return safe_open(self.path(first), "np")

    def _whole(self, first: int) -> bool:
        try:
            content = self._file(first)
            shapes = [tuple(content.get_slice(name).get_shape()) for name in ("logprobs", "ids")]
        except (OSError, SafetensorError):
            return False
        return content.metadata() == {"key": self.folder.name} and shapes == [self._shape(first)] * 2
