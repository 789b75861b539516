"""Files of rows that may be larger than memory: only the position of each row is held, and rows are read on access.

Compressed lines are unpacked once, into a temporary file (TMPDIR).
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from aligner.data.arrow import table_rows
from aligner.data.splits import choose, note_on
from aligner.errors import DataError
from aligner.foreign import parse_json, record

Row = dict[str, Any]
BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 20  # bytes unpacked at a time
STRETCH = 1024  # rows read together in an iteration
ARROW_END = bytes([255] * 4 + [0] * 4)  # of a file in the streaming format; without it the last rows may be missing


class FileRows(Sequence):
    """The rows of one file. A subclass defines their number, and reads a range of them."""

    def read(self, start: int, stop: int) -> list[Row]:
        raise NotImplementedError

    def __getitem__(self, index):
        numbers = range(len(self))[index]
        if isinstance(index, slice):
            return self.read(numbers.start, numbers.stop)[:: numbers.step]
        return self.read(numbers, numbers + 1)[0]

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), STRETCH):
            yield from self.read(start, min(start + STRETCH, len(self)))


class Lines(FileRows):
    """A JSONL file. Raises DataError that names the line, when a line is read that is not a JSON object."""

    def __init__(self, file: Path, key: str):
        self.file, self.key = file, key
        self._starts, self._ends, self.numbers = array("q"), array("q"), array("q")  # of lines that are not blank
        try:
            self._data = unpacked(file, key)
            start = end = 0
            for number, line in enumerate(self._data, start=1):  # binary: ends only at \n, not at U+2028
                start, end = end, end + len(line)
                if number == 1 and line.startswith(BOM):
                    start, line = len(BOM), line[len(BOM) :]
                if line.strip():
                    self._starts.append(start)
                    self._ends.append(end)
                    self.numbers.append(number)
        except OSError as error:
            raise DataError(f"{key}={str(file)!r}: expected a readable UTF-8 file ({error})") from error

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, start: int, stop: int) -> list[Row]:
        if start >= stop:
            return []
        first = self._starts[start]
        try:
            data = os.pread(self._data.fileno(), self._ends[stop - 1] - first, first)
        except OSError as error:
            raise DataError(f"{self.key}={str(self.file)!r}: cannot be read any more ({error})") from error
        return [self._parsed(data[self._starts[i] - first : self._ends[i] - first], i) for i in range(start, stop)]

    def _parsed(self, line: bytes, index: int) -> Row:
        number = self.numbers[index]
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            cause = f"line {number}: {error}"
            raise DataError(f"{self.key}={str(self.file)!r}: expected a readable UTF-8 file ({cause})") from error
        row = parse_json(text, f"{self.key}: {self.file}", DataError, line=number, nan=True)
        return record(row, f"{self.key}: {self.file}:{number}", DataError).fields


class ParquetRows(FileRows):
    """A Parquet file, with one row group in memory at a time."""

    def __init__(self, file: Path, key: str):
        import pyarrow
        import pyarrow.parquet

        self._name, self._errors = f"{key}={str(file)!r}", (pyarrow.ArrowException, OSError)
        try:
            self._file = pyarrow.parquet.ParquetFile(file)
        except self._errors as error:
            raise DataError(f"{self._name}: expected a Parquet file ({error})") from error
        meta = self._file.metadata
        sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._group: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> list[Row]:
        rows: list[Row] = []
        while start < stop:
            number = int(np.searchsorted(self._starts, start, side="right")) - 1
            end = min(stop, int(self._starts[number + 1]))
            try:
                if self._group[0] != number:
                    self._group = number, self._file.read_row_group(number)
                table = self._group[1].slice(start - int(self._starts[number]), end - start)
                rows += table_rows(table, self._name)
            except self._errors as error:
                raise DataError(f"{self._name}: expected a Parquet file ({error}, row group {number})") from error
            start = end
        return rows


class SavedRows(FileRows):
    """A folder written by `datasets.save_to_disk`, which the library maps into memory."""

    def __init__(self, root: Path, key: str):
        import datasets

        for file in sorted([*root.glob("*.arrow"), *root.glob("*/*.arrow")]):
            if not file.name.startswith("cache-") and not _whole(file):
                cut = f"{file.relative_to(root)} is cut off: copy or write it again"
                raise DataError(f"{key}={str(root)!r}: expected whole Arrow files, {cut}")
        try:
            data = datasets.load_from_disk(str(root))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{key}={str(root)!r}: expected a datasets.save_to_disk folder ({error})") from error
        self.note, self._name = "", f"{key}={str(root)!r}"
        if isinstance(data, datasets.DatasetDict):
            chosen = choose(list(data), key, str(root))
            if len(chosen) != 1:
                names = ", ".join(f"{root / name}" for name in data)
                raise DataError(f"{self._name}: expected one split, found {len(data)}: name one of {names}")
            self.note = note_on(chosen, [name for name in data if name not in chosen], key, str(root))
            data = data[chosen.pop()]
        self._data = data.with_format("arrow")

    def __len__(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> list[Row]:
        try:
            return table_rows(self._data[start:stop], self._name) if start < stop else []
        except (OSError, ValueError) as error:  # Arrow's are both
            raise DataError(f"{self._name}: rows from {start + 1} on cannot be read ({error})") from error


def _whole(file: Path) -> bool:
    with file.open("rb") as data:
        data.seek(-min(len(ARROW_END), file.stat().st_size), os.SEEK_END)
        return data.read() == ARROW_END


def unpacked(file: Path, key: str) -> IO[bytes]:
    """Open a file's bytes, of a .gz or .zst its content, for reading at any position.

    Raises DataError for a damaged archive, OSError.
    """
    if file.suffix not in (".gz", ".zst"):
        return file.open("rb")
    try:
        out = tempfile.TemporaryFile()  # noqa: SIM115 (gone with its last handle)
        out.writelines(_blocks(file, key))
        out.seek(0)
    except OSError as error:
        where = f"{tempfile.gettempdir()} (TMPDIR)"
        raise DataError(f"{key}={str(file)!r}: cannot be unpacked to {where} ({error})") from error
    return out


def _blocks(file: Path, key: str) -> Iterator[bytes]:
    import pyarrow

    opened = (
        gzip.open if file.suffix == ".gz" else lambda f: pyarrow.CompressedInputStream(pyarrow.OSFile(str(f)), "zstd")
    )
    done = 0
    with opened(file) as packed:
        try:
            while block := packed.read(BLOCK):
                done += len(block)
                yield block
        except (EOFError, zlib.error, pyarrow.ArrowException, OSError) as error:
            cause = f"damaged after byte {done} of its content: {error}"
            raise DataError(f"{key}={str(file)!r}: expected a whole {file.suffix} archive ({cause})") from error
