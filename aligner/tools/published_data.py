"""`aligner data`: files that the recipes' keys `data.train` and `data.eval` name, from a published dataset's folder."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from aligner.config.checks import DATA_FILES
from aligner.data.readers import Rows, read_rows
from aligner.errors import ConfigError, DataError
from aligner.tools.published_rows import PUBLISHED, PublishedData, Row, UnfitRowError, dataset

HELD_OUT = 100  # one of so many prompts, where a dataset has no rows to evaluate on
TRAIN, EVAL = "train.jsonl", "eval.jsonl"


def main(args: argparse.Namespace) -> int:
    """Run `aligner data`. Raises DataError for a folder without the dataset's files, or rows of another layout."""
    if not args.name:
        for name, data in PUBLISHED.items():
            print(f"{name:<16}{data.repository}")
        return 0
    data = dataset(args.name)
    if args.rows < 0:
        raise ConfigError("--rows", args.rows, "a number >= 0")
    folder, out = Path(args.folder).expanduser(), Path(args.out).expanduser() / args.name
    download = f"hf download --repo-type dataset {data.repository} --local-dir FOLDER"
    if not args.folder or not folder.is_dir():
        raise DataError(f"FOLDER={args.folder!r}: expected the folder of {data.repository}: {download}")
    out.mkdir(parents=True, exist_ok=True)
    left_out: Counter[str] = Counter()
    counts = _write(data, folder, out, args.rows, left_out, download)
    reasons = "".join(f", {count} left out: {reason}" for reason, count in sorted(left_out.items()))
    print(f"{out / TRAIN}: {counts[TRAIN]} rows; {out / EVAL}: {counts[EVAL]}{reasons}")
    return 0


def _write(
    data: PublishedData, folder: Path, out: Path, most: int, left_out: Counter[str], download: str
) -> Counter[str]:
    """Write both files and return their numbers of rows. Large datasets are never in memory as a whole."""
    seen: set[bytes] = set()
    counts: Counter[str] = Counter()
    parts = {name: out / f"{name}.partial" for name in (TRAIN, EVAL)}
    sources = {EVAL: data.held_out, TRAIN: data.train} if data.held_out else {TRAIN: data.train}
    with parts[TRAIN].open("w", encoding="utf-8") as train, parts[EVAL].open("w", encoding="utf-8") as held_out:
        for kind, patterns in sources.items():
            for row, digest in _made(data, _files(folder, patterns, download), most, left_out):
                if data.once and digest in seen:
                    left_out["repeated prompt"] += 1
                    continue
                seen |= {digest} if data.once else set()
                apart = not data.held_out and int.from_bytes(digest) % HELD_OUT == 0
                name = EVAL if apart else kind
                (held_out if name == EVAL else train).write(json.dumps(row, ensure_ascii=False) + "\n")
                counts[name] += 1
    for name, path in parts.items():
        path.replace(out / name)
    return counts


def _files(folder: Path, patterns: tuple[str, ...], download: str) -> Rows:
    """Return the rows of the files that match. Of the patterns that name one file twice the first counts."""
    files = dict.fromkeys(path for pattern in patterns for path in sorted(folder.glob(pattern)))
    wanted = [path for path in files if path.name.endswith(DATA_FILES)]
    if not wanted:
        raise DataError(f"FOLDER={str(folder)!r}: expected files {', '.join(patterns)} there: {download}")
    return Rows([(str(path), read_rows(str(path), "FOLDER")) for path in wanted])


def _made(data: PublishedData, rows: Rows, most: int, left_out: Counter[str]) -> Iterator[tuple[Row, bytes]]:
    """Yield each row to write, with a hash of its prompt."""
    for index, row in enumerate(islice(rows, most or None)):
        try:
            made = data.row(row)
        except UnfitRowError as reason:
            left_out[str(reason)] += 1
            continue
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as cause:
            columns = ", ".join(row)
            expected = f"expected a row of {data.repository}, found the columns {columns}"
            raise DataError(f"{rows.where(index)}: {expected} ({type(cause).__name__}: {cause})") from None
        yield made, hashlib.sha256(json.dumps(_prompt_of(made)).encode()).digest()[:8]


def _prompt_of(row: Row) -> Any:
    """Return the prompt of a row: all messages but the last where there is no other."""
    return row.get("prompt") or (row.get("messages") or row["chosen"])[:-1]
