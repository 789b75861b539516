"""Choice of the split of a dataset that a key reads.

Names are those of the Hugging Face Hub: `train-00000-of-00001.parquet`, `test.jsonl`, a folder `validation/`, also
`dev` and `eval`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from aligner.config.checks import DATA_FILES
from aligner.errors import DataError

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_KIND = {word: kind for kind, words in KEYWORDS.items() for word in words}
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}.*")
# files of a clone from the Hub that `datasets` ignores
NO_DATA = ("config.json", "dataset_infos.json")
HELD_OUT = ("validation", "test")  # data.eval reads the first of these
EVAL = "data.eval"
_UNNAMED = "files without a split's name"
_ADVICE = "name its files or its folder, several in data.sources"


class Files(NamedTuple):
    files: list[Path]
    note: str  # on splits that are left out; empty: none


def split_files(root: Path, key: str) -> Files:
    """Return the files of a folder that `key` reads.

    They are in the folder itself and its folders `train`, `test` and so on, or else in its folder `data`. Returns no
    files if there are none. Raises DataError for several possible splits.
    """
    named = _named(root) or _named(root / "data")
    chosen = choose({name for _, name in named}, key, str(root))
    skipped = [name for _, name in named if name not in chosen]
    return Files([file for file, name in named if name in chosen], note_on(chosen, skipped, key, str(root)))


def folders_with_files(root: Path) -> list[Path]:
    """Return the folders directly below this one from which `split_files` could read."""
    folders = [entry for entry in sorted(root.iterdir()) if entry.is_dir()]
    return [folder for folder in folders if _named(folder) or _named(folder / "data")]


def choose(names: Collection[str], key: str, where: str) -> set[str]:
    """Return the splits that `key` reads: data.eval held-out ones, other keys those to train on.

    A split without a name is read with those to train on. Raises DataError.
    """
    kinds = {name: _kind(name) for name in names}
    if len(names) == 1 or not any(kinds.values()):
        return set(names)
    held_out = [kind for kind in HELD_OUT if kind in kinds.values()]
    if key == EVAL and held_out:
        return {_only(kinds, held_out[0], key, where)}
    if key == EVAL and any(name and not kind for name, kind in kinds.items()):
        raise DataError(f"{key}={where!r}: expected a split validation or test, found {_listed(names)}: {_ADVICE}")
    if "train" in kinds.values():
        return {_only(kinds, "train", key, where)} | ({""} & set(names))
    others = {name for name, kind in kinds.items() if not kind}
    if not others:
        raise DataError(f"{key}={where!r}: expected a split train, found {_listed(names)}: {_ADVICE}")
    return others


def note_on(chosen: Iterable[str], skipped: Sequence[str], key: str, where: str) -> str:
    """Describe in a line the splits that `key` reads of `where`, and those that it skips.

    Empty if all are read, and each fits the key.
    """
    names = sorted(set(chosen) - {""})
    if not skipped and not any(_kind(name) and (_kind(name) in HELD_OUT) != (key == EVAL) for name in names):
        return ""
    read = f"split {' and '.join(names)}" if names else _UNNAMED
    counts = ", ".join(f"{name or _UNNAMED} ({skipped.count(name)})" for name in sorted(set(skipped)))
    return f"reads {read} of {where}, " + (f"leaves out {counts}" if counts else "which has no other")


def _only(kinds: dict[str, str], kind: str, key: str, where: str) -> str:
    """Return the only split of a kind, or the one whose name is exactly that of the kind."""
    fitting = sorted(name for name, its in kinds.items() if its == kind)
    exact = [name for name in fitting if name.lower() in KEYWORDS[kind]]
    if len(exact) == 1 or len(fitting) == 1:
        return (exact or fitting)[0]
    raise DataError(f"{key}={where!r}: expected one split {kind}, found {_listed(fitting)}: {_ADVICE}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(name or _UNNAMED for name in names))


def _named(root: Path) -> list[tuple[Path, str]]:
    """Return the data files of a folder, by name, each with its split; those of a folder `train` are of that split."""
    if not root.is_dir():
        return []
    files = [(file, _split(file)) for file in sorted(root.iterdir()) if _is_data(file)]
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and _kind(folder.name):
            files += [(file, _kind(folder.name)) for file in sorted(folder.rglob("*")) if _is_data(file)]
    return files


def _is_data(file: Path) -> bool:
    return file.name.endswith(DATA_FILES) and file.name not in NO_DATA and file.is_file()


def _split(file: Path) -> str:
    """Return the split of a file: `train_sft` of train_sft-00000-of-00001.parquet, else the kind in its name, or
    nothing."""
    stem = next(file.name.removesuffix(end) for end in DATA_FILES if file.name.endswith(end))
    shard = _SHARD.fullmatch(stem)
    return (_KIND.get(shard[1].lower()) or shard[1]) if shard else _kind(stem)


def _kind(name: str) -> str:
    """Return train, validation or test, by a word of the name, as in `datasets`; else empty."""
    words = re.split(r"[-._ 0-9]+", name.lower())
    return next((_KIND[word] for word in words if word in _KIND), "")
