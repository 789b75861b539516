"""Finished rollouts whose step is not in a checkpoint yet: stored, so that a killed run does not generate them again.

<run.dir>/pending_rollouts/step-00000013/
    part-00000-of-00002.safetensors   a data-parallel rank's samples and scores (format of `rollout/record.py`)
    part-00000-of-00002.json          written last, behind its own checksum: that of the part, slots, and in part 0 the
                                      metrics and what a step of the source changes (data cursor, reward normaliser,
                                      sentinel)

A rollout counts when all its parts are there, whole and of one making; else it is made again, and damage is told.
Storing takes no message between ranks; a stored rollout may be read on any number of data-parallel ranks. Those of all
steps since the last checkpoint are kept, because a resumed run goes through all of them; a checkpoint's commit deletes
them up to its step.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aligner.errors import DataError
from aligner.files import file_hash, fsync_file, fsync_folder, write_whole
from aligner.megatron.checkpoint import rng_state
from aligner.megatron.groups import Layout
from aligner.ops.agree import by_rank_0
from aligner.ops.reduce import first_cause
from aligner.rewards.composite import Scores
from aligner.rollout.record import Origin, join_rollouts, join_scores, read_recording, write_recording
from aligner.rollout.sharing import share
from aligner.rollout.source import Rollout, Rollouts
from aligner.run.checkpoints import Stateful
from aligner.run.timers import Timers
from aligner.types import RolloutBatch, ScalarMetrics

FOLDER = "pending_rollouts"  # in the run folder
PART = re.compile(r"part-(\d{5})-of-(\d{5})\.json")
Manifest = list[dict[str, Any]]  # the parts' descriptions, by data-parallel rank


@dataclass
class PendingRollouts:
    """A source that stores what its `source` gives, and after a restart gives it once more."""

    source: Rollouts
    folder: Path
    key: str  # hash of everything that the rollouts of this run depend on, but for the layout
    origin: Origin
    layout: Layout
    states: Mapping[str, Stateful]  # what `source.next` changes
    version: Callable[[], int]  # of the policy's weights
    pad_id: int
    timers: Timers = field(default_factory=Timers)
    _stored: dict[int, Manifest] | None = field(default=None, init=False)

    def next(self, step: int) -> Rollout:
        """The stored rollout of `step` if there is one that was made by these weights and this config; else a new one.
        A damaged one is reported and made again. Collective, as the source is."""
        if self._stored is None:
            self._stored = by_rank_0(self._find)
        manifest = self._stored.pop(step, None)
        if manifest is not None and manifest[0]["weight_version"] == self.version():
            found = self._load(step, manifest)
            if found is not None:
                return found
        before = rng_state()
        found = self.source.next(step)
        with self.timers("store"):
            after = rng_state()
            # one that has drawn from the process's random state could not be given again without that
            if self.layout.peers.rank() == 0 and all(torch.equal(t, after[name]) for name, t in before.items()):
                self._store(step, *found)
        return found

    def drop(self, step: int) -> None:
        """The checkpoint of `step` is complete: forget the rollouts up to it."""
        if dist.get_rank() == 0:
            for number, path in self._folders():
                if number <= step:
                    shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """For a start that does not continue what was stored here."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _folders(self) -> list[tuple[int, Path]]:
        return sorted((int(path.name.removeprefix("step-")), path) for path in self.folder.glob("step-*"))

    def _store(self, step: int, rollout: RolloutBatch, metrics: ScalarMetrics, scores: Scores) -> None:
        """This data-parallel rank's part. A full disk costs the safety, not the run."""
        rank, ranks = self.layout.dp_rank, self.layout.data
        place = self.folder / f"step-{step:08d}" / f"part-{rank:05d}-of-{ranks:05d}.safetensors"
        try:
            write_recording(place, rollout, scores, self.origin, step)
            fsync_file(place)
            mine = share(self.origin.prompts, ranks, rank)
            told = {"key": self.key, "weight_version": rollout.weight_version, "file": place.name}
            told |= {"sha256": file_hash(place), "slots": [mine.start, mine.stop]}
            if rank == 0:
                state = {name: item.state_dict() for name, item in self.states.items()}
                told |= {"metrics": metrics, "state": state}
            _write_description(place.with_suffix(".json"), told)
        except OSError as error:
            print(f"warning: rollout {step} is not stored (checkpoint.rollouts): {error}", file=sys.stderr, flush=True)

    def _find(self) -> dict[int, Manifest]:
        """Whole rollouts by step; whatever else lies there is deleted before anyone writes."""
        found: dict[int, Manifest] = {}
        for step, path in self._folders():
            try:
                manifest = _read_manifest(path)
            except DataError as error:
                _tell_again(step, str(error))
                manifest = None
            mine = manifest is not None and manifest[0]["key"] == self.key
            if mine and manifest[0]["state"].keys() == self.states.keys():
                found[step] = manifest
            else:
                shutil.rmtree(path, ignore_errors=True)
        return found

    def _load(self, step: int, manifest: Manifest) -> Rollout | None:
        """This rank's slots out of the parts that hold them; None on every rank if any of them is damaged."""
        mine = share(self.origin.prompts, self.layout.data, self.layout.dp_rank)
        parts, cause = [], ""
        try:
            for part in manifest:
                slots = range(max(mine.start, part["slots"][0]), min(mine.stop, part["slots"][1]))
                if slots:
                    path = self.folder / f"step-{step:08d}" / part["file"]
                    parts.append(_read_part(path, part["sha256"], slots))
        except (DataError, OSError) as error:
            cause = str(error)
        first = first_cause(cause)
        if first is not None:
            if dist.get_rank() == 0:
                _tell_again(step, f"on rank {first[0]}: {first[1]}")
            return None
        for name, item in self.states.items():
            item.load_state_dict(manifest[0]["state"][name])
        rollout = join_rollouts([rollout for rollout, _ in parts], self.pad_id).trim()
        return Rollout(rollout, dict(manifest[0]["metrics"]), join_scores([scores for _, scores in parts]))


def _tell_again(step: int, why: str) -> None:
    print(f"WARNING: {why}\nWARNING: rollout {step} is generated again", flush=True)


def _write_description(path: Path, told: dict[str, Any]) -> None:
    """Behind its own checksum; there whole and for good, or not at all. Raises OSError."""
    text = json.dumps(told)
    write_whole(path, f"{_sha256(text)}\n{text}")
    fsync_folder(path.parent)


def _read_description(path: Path) -> dict[str, Any]:
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
            parts[int(match[1])] = _read_description(path)
    if not expected or sorted(parts) != list(range(expected)):
        return None
    found = [parts[i] for i in range(expected)]
    if any((part["key"], part["weight_version"]) != (found[0]["key"], found[0]["weight_version"]) for part in found):
        raise DataError(f"{folder}: its parts are of different runs or weights")
    return found


def _read_part(path: Path, sha256: str, slots: range) -> tuple[RolloutBatch, Scores]:
    if file_hash(path) != sha256:
        raise DataError(f"{path}: damaged: its checksum is not the one of its description")
    recording = read_recording(path, slots, whole=False)
    return recording.rollout, recording.scores
