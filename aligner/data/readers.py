"""A dataset as rows: JSONL (also .gz, .zst), JSON, Parquet, a `datasets.save_to_disk` folder, or a folder of files."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import UUID

from aligner.config.checks import DATA_FILES
from aligner.data.files import Lines, ParquetRows, Row, SavedRows
from aligner.data.splits import folders_with_files, split_files
from aligner.errors import DataError
from aligner.foreign import parse_json

WRITTEN = (bytes, date, time, timedelta, Decimal, UUID)  # types of Parquet besides JSON's: their repr is their value


class Rows(Sequence):
    """The rows of several files, read on access. Raises DataError if a row cannot be read."""

    def __init__(self, parts: Sequence[tuple[str, Sequence[Row]]], note: str = ""):
        """Take name and rows of each file. `note`: about files of a folder that are left out."""
        self.note = note
        self._parts, self._ends = list(parts), list(accumulate(len(rows) for _, rows in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index):
        numbers = range(len(self))[index]
        if not isinstance(index, slice):
            _, file, inside = self._find(numbers)
            return file[inside]
        rows: list[Row] = []
        start = numbers.start
        while start < numbers.stop:
            _, file, inside = self._find(start)
            rows += file[inside : inside + numbers.stop - start]
            start += len(file) - inside
        return rows[:: numbers.step]

    def __iter__(self) -> Iterator[Row]:
        return (row for _, file in self._parts for row in file)

    def _find(self, index: int) -> tuple[str, Sequence[Row], int]:
        """Return name and rows of the file with row `index`, and its index there."""
        number = bisect_right(self._ends, index)
        name, file = self._parts[number]
        return name, file, index - self._ends[number] + len(file)

    def where(self, index: int) -> str:
        """Return `file, row n` (from 1, blank lines not counted) of row `index`; with the line if that differs."""
        name, file, inside = self._find(index)
        line = file.numbers[inside] if isinstance(file, Lines) else inside + 1
        return f"{name}, row {inside + 1}" + (f" (line {line})" if line != inside + 1 else "")

    def content(self) -> str:
        """Return 16 hexadecimal digits of SHA-256 over the rows, the same for all kinds of files.

        All columns count, because reward functions may read any. Raises DataError for a value that is not the same in
        another process.
        """
        digest, index = hashlib.sha256(), 0

        def written(value: Any) -> str:
            if isinstance(value, WRITTEN):
                return repr(value)
            raise DataError(
                f"{self.where(index)}: expected text, numbers, lists, objects, bytes, dates or decimals, found "
                f"{type(value).__name__}. Leave that column out of the data"
            )

        for index, row in enumerate(self):  # noqa: B007 (read by `written`)
            digest.update(json.dumps(row, sort_keys=True, default=written).encode() + b"\n")
        return digest.hexdigest()[:16]


def read_rows(path: str, key: str = "data.train") -> Rows:
    """Return all rows of the dataset at `path`, in file order.

    Files of a folder are ordered by name; of several splits one is read (`splits.py`).

    Raises DataError, naming `key` and the file (and line), for a missing file, an empty dataset or, when they are read,
    malformed rows.
    """
    if not path:
        raise DataError(f"{key}={path!r}: expected a file or folder")
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{key}={path!r}: expected an existing file or folder")
    rows = _read_folder(root, key) if root.is_dir() else Rows([(str(root), _read_file(root, key))])
    if not rows:
        raise DataError(f"{key}={path!r}: expected at least one row, the dataset is empty")
    return rows


def _read_folder(root: Path, key: str) -> Rows:
    if (root / "dataset_dict.json").is_file() or (root / "dataset_info.json").is_file():
        saved = SavedRows(root, key)
        return Rows([(str(root), saved)], saved.note)
    files, note = split_files(root, key)
    if not files:
        expected = f"a datasets.save_to_disk folder, or files that end in {', '.join(DATA_FILES)}"
        folders = ", ".join(map(str, folders_with_files(root)))
        hint = f"; found none but in {folders}: name one of them" if folders else ""
        raise DataError(f"{key}={str(root)!r}: expected {expected}{hint}")
    return Rows([(str(file), _read_file(file, key)) for file in files], note)


def _read_file(file: Path, key: str) -> Sequence[Row]:
    if not file.name.endswith(DATA_FILES):
        raise DataError(f"{key}={str(file)!r}: expected a file that ends in {', '.join(DATA_FILES)}")
    if file.suffix == ".parquet":
        return ParquetRows(file, key)
    return _read_json(file, key) if file.suffix == ".json" else Lines(file, key)


def _read_json(file: Path, key: str) -> list[Row]:
    """Read a list whole: the beginning of a row could be located only by reading everything before it."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{key}={str(file)!r}: expected a readable UTF-8 file ({error})") from error
    rows = parse_json(text, f"{key}: {file}", DataError, nan=True)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{key}={str(file)!r}: expected a JSON list of objects (one object per line is .jsonl)")
    return rows
