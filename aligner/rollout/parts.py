"""Rollouts in the run folder, a part from each data-parallel rank: there whole, or not there.

<run.dir>/pending_rollouts/step-00000013/
    part-00000-of-00002.safetensors   what a data-parallel rank has of it
    part-00000-of-00002.json          written last, behind its own checksum: that of the part, its slots, weight version

Storing takes no message between ranks; what is stored may be read on any number of data-parallel ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from aligner.errors import DataError
from aligner.files import file_hash, fsync_file, fsync_folder, write_whole
from aligner.megatron.groups import Layout
from aligner.ops.reduce import first_cause
from aligner.rollout.sharing import share

FOLDER = "pending_rollouts"  # in the run folder
NAME = re.compile(r"step-(\d{8,18})", re.ASCII)
PART = re.compile(r"part-(\d{5})-of-(\d{5})\.json")
Manifest = list[dict[str, Any]]  # the parts' descriptions, by data-parallel rank


@dataclass(frozen=True)
class Parts:
    folder: Path
    key: str  # hash of everything that the rollouts of this run depend on, but for the layout
    layout: Layout
    slots: int  # prompts of a rollout
    other_key: str = ""  # that is as good as `key`

    @property
    def mine(self) -> range:
        """Slots of this rank."""
        return range(self.slots)[share(self.slots, self.layout.data, self.layout.dp_rank)]

    @property
    def part(self) -> tuple[int, int]:
        """Of a rollout's parts the number of this rank's, and how many there are."""
        return self.layout.dp_rank, self.layout.data

    def of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        return sorted(int(match[1]) for path in self.folder.glob("step-*") if (match := NAME.fullmatch(path.name)))

    def others(self) -> list[str]:
        """What lies there and is no rollout."""
        return sorted(path.name for path in self.folder.glob("*") if not NAME.fullmatch(path.name))

    def write(self, step: int, version: int, write: Callable[[Path], None], told: dict[str, Any]) -> None:
        """This data-parallel rank's part, which `write` makes; `told` is described with it. Raises OSError."""
        (rank, ranks), mine = self.part, self.mine
        place = self.of(step) / f"part-{rank:05d}-of-{ranks:05d}.safetensors"
        write(place)
        fsync_file(place)
        found = {"key": self.key, "weight_version": version, "file": place.name}
        _write_description(
            place.with_suffix(".json"), found | {"sha256": file_hash(place), "slots": [mine.start, mine.stop]} | told
        )

    def whole(self, step: int) -> Manifest | None:
        """The description of a whole rollout of this run. Whatever else lies there is deleted, damage is told."""
        try:
            manifest = _read_manifest(self.of(step))
        except DataError as error:
            tell_again(step, str(error))
            manifest = None
        if manifest is not None and manifest[0]["key"] in (self.key, self.other_key):
            return manifest
        self.delete(step)
        return None

    def read[T](self, step: int, manifest: Manifest, read: Callable[[Path, range, range], T]) -> list[T] | None:
        """What `read` makes of each part that has some of this rank's slots, from its path, its slots and those of them
        that are wanted; None on every rank if one is damaged anywhere, which is told. Collective."""
        found, cause, mine = [], "", self.mine
        try:
            for part in manifest:
                held = range(*part["slots"])
                wanted = range(max(mine.start, held.start), min(mine.stop, held.stop))
                if wanted:
                    path = self.of(step) / part["file"]
                    if file_hash(path) != part["sha256"]:
                        raise DataError(f"{path}: damaged: its checksum is not the one of its description")
                    found.append(read(path, held, wanted))
        except (DataError, OSError) as error:
            cause = str(error)
        first = first_cause(cause)
        if first is None:
            return found
        if dist.get_rank() == 0:
            tell_again(step, f"on rank {first[0]}: {first[1]}")
        return None

    def delete(self, step: int) -> None:
        shutil.rmtree(self.of(step), ignore_errors=True)

    def drop(self, step: int, needed: Collection[int] = ()) -> None:
        """The checkpoint of `step` is complete: forget the rollouts up to it, but for those `needed`."""
        if dist.get_rank() == 0:
            for number in self.steps():
                if number <= step and number not in needed:
                    self.delete(number)

    def clear(self) -> None:
        """For a start that does not continue what was stored here."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def tell_again(step: int, why: str) -> None:
    print(f"WARNING: {why}\nWARNING: rollout {step} is generated again", flush=True)


def _write_description(path: Path, told: dict[str, Any]) -> None:
    """Behind its own checksum; there whole and for good, or not at all. Raises OSError."""
    text = json.dumps(told)
    write_whole(path, f"{_sha256(text)}\n{text}")
    fsync_folder(path.parent)


def read_description(path: Path) -> dict[str, Any]:
    """Raises DataError if it is not what was written."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if digest != _sha256(text):
        raise DataError(f"{path}: damaged: it does not have its checksum")
    return json.loads(text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_manifest(folder: Path) -> Manifest | None:
    """The descriptions of all parts, None where one is missing: a kill while they were written. Raises DataError where
    one is damaged, or of another making than the first."""
    parts: dict[int, dict[str, Any]] = {}
    expected = 0
    for path in folder.glob("part-*.json"):
        match = PART.fullmatch(path.name)
        if match is not None:
            expected = int(match[2])
            parts[int(match[1])] = read_description(path)
    if not expected or sorted(parts) != list(range(expected)):
        return None
    found = [parts[i] for i in range(expected)]
    if any((part["key"], part["weight_version"]) != (found[0]["key"], found[0]["weight_version"]) for part in found):
        raise DataError(f"{folder}: its parts are of different runs or weights")
    return found
