"""Finished rollouts whose step is not in a checkpoint yet: stored, so that a killed run does not generate them again.

A part (`rollout/parts.py`) has a data-parallel rank's samples and scores in the format of `rollout/record.py`; the
first one's description also has the metrics and what a step of the source changes (data cursor, reward normaliser,
sentinel).

A rollout counts when all its parts are there, whole and of one making; else it is made again, and damage is told. Those
of all steps since the last checkpoint are kept, because a resumed run goes through all of them; a checkpoint's commit
deletes them up to its step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from aligner.megatron.checkpoint import rng_state
from aligner.ops.agree import by_rank_0
from aligner.rewards.composite import Scores
from aligner.rollout.parts import Manifest, Parts
from aligner.rollout.record import Origin, join_rollouts, join_scores, read_recording, write_recording
from aligner.rollout.source import Rollout, Rollouts
from aligner.run.checkpoints import Stateful
from aligner.run.timers import Timers
from aligner.types import RolloutBatch, ScalarMetrics


@dataclass
class PendingRollouts:
    """A source that stores what its `source` gives, and after a restart gives it once more."""

    source: Rollouts
    parts: Parts
    origin: Origin
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
            if self.parts.layout.peers.rank() == 0 and all(torch.equal(t, after[name]) for name, t in before.items()):
                self._store(step, *found)
        return found

    def _store(self, step: int, rollout: RolloutBatch, metrics: ScalarMetrics, scores: Scores) -> None:
        """This data-parallel rank's part. A full disk costs the safety, not the run."""
        told = {}
        if self.parts.layout.dp_rank == 0:
            told = {"metrics": metrics, "state": {name: item.state_dict() for name, item in self.states.items()}}
        write = lambda path: write_recording(path, rollout, scores, self.origin, step)  # noqa: E731
        try:
            self.parts.write(step, rollout.weight_version, write, told)
        except OSError as error:
            print(f"warning: rollout {step} is not stored (checkpoint.rollouts): {error}", file=sys.stderr, flush=True)

    def _find(self) -> dict[int, Manifest]:
        """Whole rollouts by step; whatever else lies there is deleted before anyone writes."""
        found: dict[int, Manifest] = {}
        for step in self.parts.steps():
            manifest = self.parts.whole(step)
            if manifest is not None and manifest[0]["state"].keys() == self.states.keys():
                found[step] = manifest
            else:
                self.parts.delete(step)
        return found

    def _load(self, step: int, manifest: Manifest) -> Rollout | None:
        """This rank's slots out of the parts that hold them; None on every rank if any of them is damaged."""
        found = self.parts.read(step, manifest, _read_part)
        if found is None:
            return None
        for name, item in self.states.items():
            item.load_state_dict(manifest[0]["state"][name])
        rollout = join_rollouts([rollout for rollout, _ in found], self.pad_id).trim()
        return Rollout(rollout, dict(manifest[0]["metrics"]), join_scores([scores for _, scores in found]))


def _read_part(path: Path, held: range, wanted: range) -> tuple[RolloutBatch, Scores]:
    recording = read_recording(path, wanted, whole=False)
    return recording.rollout, recording.scores
