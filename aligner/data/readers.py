"""Read a dataset into rows: JSONL, JSON, Parquet, a `datasets.save_to_disk` folder, or a folder of such files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from aligner.errors import DataError
from aligner.foreign import parse_json, record

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
WRITTEN = (bytes, date, time, timedelta, Decimal, UUID)  # of Parquet, beside JSON's kinds: their repr is their value


class Rows(Sequence):
    """A list of rows that remembers which file each came from."""

    def __init__(self, parts: list[tuple[str, list[Row]]]):
        self.rows = [row for _, part in parts for row in part]
        self._parts = [(name, len(part)) for name, part in parts]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def where(self, index: int) -> str:
        """`file, row n` (from 1, blank lines not counted) of row `index`."""
        for name, size in self._parts:
            if index < size:
                return f"{name}, row {index + 1}"
            index -= size
        raise IndexError(index)

    def content(self) -> str:
        """16 hexadecimal digits of SHA-256 over the rows, whatever kind of file they came from. All columns count:
        reward functions may read any. Raises DataError for a value that is not the same in another process."""
        digest, index = hashlib.sha256(), 0

        def written(value: Any) -> str:
            if isinstance(value, WRITTEN):
                return repr(value)
            raise DataError(
                f"{self.where(index)}: expected text, numbers, lists, objects, bytes, dates or decimals, found "
                f"{type(value).__name__}. Leave that column out of the data"
            )

        for index, row in enumerate(self.rows):  # noqa: B007 (read by `written`)
            digest.update(json.dumps(row, sort_keys=True, default=written).encode() + b"\n")
        return digest.hexdigest()[:16]


def read_rows(path: str, key: str = "data.train") -> Rows:
    """All rows of the dataset at `path`, in file order (files of a folder by name).

    Raises DataError, naming `key` and the file (and line), for a missing file, malformed content or an empty dataset.
    """
    if not path:
        raise DataError(f"{key}={path!r}: expected a file or folder")
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{key}={path!r}: expected an existing file or folder, found nothing there")
    parts = _read_folder(root, key) if root.is_dir() else [(str(root), _read_file(root, key))]
    rows = Rows(parts)
    if not rows:
        raise DataError(f"{key}={path!r}: expected at least one row, the dataset is empty")
    return rows


def _read_folder(root: Path, key: str) -> list[tuple[str, list[Row]]]:
    if (root / "dataset_dict.json").is_file() or (root / "dataset_info.json").is_file():
        return [(str(root), _read_saved(root, key))]
    files = sorted(f for f in root.iterdir() if f.suffix in SUFFIXES and f.is_file())
    if not files:
        raise DataError(
            f"{key}={str(root)!r}: expected a datasets.save_to_disk folder, or files that end in {', '.join(SUFFIXES)}"
        )
    return [(str(file), _read_file(file, key)) for file in files]


def _read_file(file: Path, key: str) -> list[Row]:
    if file.suffix == ".parquet":
        return _read_parquet(file, key)
    if file.suffix not in SUFFIXES:
        raise DataError(f"{key}={str(file)!r}: expected a file that ends in {', '.join(SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{key}={str(file)!r}: expected a readable UTF-8 file ({error})") from error
    return _parse_jsonl(text, file, key) if file.suffix == ".jsonl" else _parse_json(text, file, key)


def _parse_jsonl(text: str, file: Path, key: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also split at U+2028 inside strings
        if line.strip():
            row = parse_json(line, f"{key}: {file}", DataError, line=number, nan=True)
            rows.append(record(row, f"{key}: {file}:{number}", DataError).fields)
    return rows


def _parse_json(text: str, file: Path, key: str) -> list[Row]:
    rows = parse_json(text, f"{key}: {file}", DataError, nan=True)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{key}={str(file)!r}: expected a JSON list of objects (one object per line is .jsonl)")
    return rows


def _read_parquet(file: Path, key: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file).read().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{key}={str(file)!r}: expected a Parquet file ({error})") from error


def _read_saved(root: Path, key: str) -> list[Row]:
    import datasets

    try:
        data = datasets.load_from_disk(str(root))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{key}={str(root)!r}: expected a datasets.save_to_disk folder ({error})") from error
    if isinstance(data, datasets.DatasetDict):
        if len(data) != 1:
            names = ", ".join(f"{root / name}" for name in data)
            raise DataError(f"{key}={str(root)!r}: expected one split, found {len(data)}: name one of {names}")
        data = next(iter(data.values()))
    return data.with_format(None).to_list()
