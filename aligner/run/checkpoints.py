"""Checkpoint folders: written aside and renamed, verified when loaded, the newest few and the best kept.

<run.dir>/checkpoints/step-00000120/
    policy/  critic/      sharded weights and optimizer of each model (megatron/checkpoint.py)
    rng/rank-0000.pt      random state of every rank
    state.json            identity, step, and the small states: data cursor, KL controller, reward normaliser, ...
    manifest.json         checksums of the small files; those of the large ones are in <model>/integrity.json
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.errors import CheckpointError
from aligner.files import fsync_file, fsync_folder, fsync_tree, write_whole
from aligner.megatron.checkpoint import ModelSave, load_model, rng_state, set_rng_state
from aligner.megatron.checkpoint_files import FORMAT, put_in_place, read_checked, view, write_manifest
from aligner.megatron.train import ShardedModel
from aligner.ops.agree import by_rank_0, fail_together, same_view
from aligner.ops.reduce import first_cause
from aligner.run.candidates import candidates_for, keep_damaged
from aligner.run.changes import AnotherRunError, check_identity, compare, note, reordered
from aligner.run.retention import Retention

# states that checkpoints of earlier versions, or of runs without a stream or a lag, may lack
DISPENSABLE = ("sentinel", "ptx", "ahead", "clock")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SaveError(CheckpointError):
    """A checkpoint could not be written: a full disk, or a file system that is unavailable."""

    transient = True


@dataclass
class _Writing:
    """A checkpoint that is being written."""

    step: int
    aside: Path
    models: list[ModelSave]
    rng: dict[str, torch.Tensor]
    content: str  # of state.json
    now: Callable[[], float]
    started_s: float
    seconds: float = 0.0  # until this rank had written its part
    thread: threading.Thread | None = None
    error: str = ""
    rank: int = field(default_factory=dist.get_rank)  # the thread may outlive the group that knows it

    def write(self) -> None:
        """Write this rank's files; no messages to other ranks."""
        try:
            for model in self.models:
                model.write()
            path = self.aside / "rng" / f"rank-{self.rank:04d}.pt"
            torch.save(self.rng, path)
            fsync_file(path)
        except (OSError, RuntimeError) as error:
            self.error = _io_message(self.aside, error)
        self.seconds = self.now() - self.started_s

    def write_aside(self) -> None:
        """Write in a thread. `finish` sees any error, and makes no checkpoint of half a one."""
        try:
            self.write()
        except BaseException as error:
            self.error = _io_message(self.aside, error)


class Checkpoints:
    """Checkpoints of one run. All methods are collective over the world."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        models: Mapping[str, ShardedModel],
        state: Mapping[str, Stateful],
        identity: Mapping[str, Any],
        definition: Mapping[str, Any] | None = None,
        accept_changes: bool = False,
    ):
        """Take `identity`: what a checkpoint must share; `definition`: what may change (config/identity.py)."""
        self.folder, self.config = run_dir / "checkpoints", config
        self.retention = Retention(self.folder, config)
        self.models, self.state, self.identity = dict(models), dict(state), dict(identity)
        self.definition, self.accept_changes = definition, accept_changes
        self.last_saved = -1  # the step saved last, or restored
        self.committed = 0  # the newest step that a restart would find
        self.seconds = 0.0  # of the last save, from its beginning until everything was written
        self.now: Callable[[], float] = time.perf_counter
        self._writing: _Writing | None = None
        self.on_save: list[Callable[[int], None]] = []  # called first on every rank with the step to be saved
        self.on_commit: list[Callable[[int], None]] = []  # called on every rank with the step of a whole checkpoint

    def save(
        self, step: int, metrics: Mapping[str, float], states: Mapping[str, Any] | None = None, wait: bool = True
    ) -> None:
        """Write step's checkpoint; an existing one stays until the new one is complete. `states` replaces the current
        ones of `self.state`. Without `wait` it is written while training continues, from a copy in host memory, and is
        no checkpoint before `finish`. An earlier one that is still being written is finished first."""
        self.finish()
        started_s = self.now()
        for prepare in self.on_save:
            prepare(step)
        self.last_saved = step
        if states is None:
            states = {name: item.state_dict() for name, item in self.state.items()}
        aside = self.folder / f"step-{step:08d}.tmp"
        self._together(aside, lambda: _fresh_folder(aside, self.models))
        content = {
            "format": FORMAT,
            "identity": self.identity,
            "definition": self.definition,
            "step": step,
            "world_size": dist.get_world_size(),
            "metric": metrics.get(self.config.metric),
            "state": dict(states),
        }
        if dist.get_rank() == 0:
            self.retention.expect_metric(step, metrics)
        models = self._together(
            aside, lambda: [ModelSave(model, aside / name, copy=not wait) for name, model in self.models.items()]
        )
        self._writing = _Writing(step, aside, models, rng_state(), json.dumps(content, indent=1), self.now, started_s)
        if wait:
            self._writing.write()
            self.finish()
        else:
            self._writing.thread = threading.Thread(target=self._writing.write_aside, name="checkpoint", daemon=True)
            self._writing.thread.start()

    @property
    def writing(self) -> bool:
        """Whether this rank still writes its part of a checkpoint."""
        return self._writing is not None and self._writing.thread is not None and self._writing.thread.is_alive()

    @property
    def unfinished(self) -> bool:
        """Whether there is a checkpoint, the same on every rank, that waits for `finish`."""
        return self._writing is not None

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, on all ranks, and complete it. Collective over the world.
        Raises SaveError on every rank if any of them could not write."""
        if self._writing is None:
            return
        now, self._writing = self._writing, None
        if now.thread is not None:
            now.thread.join()
        finish_s = self.now()
        self._fail_together(now.error, now.aside)
        self._together(now.aside, lambda: [model.finish() for model in now.models])
        self._together(now.aside, lambda: self._commit(now))
        self.committed = now.step
        self.seconds = now.seconds + self.now() - finish_s
        if dist.get_rank() == 0:
            self.retention.delete_old()
        for notify in self.on_commit:
            notify(now.step)

    def _commit(self, now: _Writing) -> None:
        if dist.get_rank():
            return
        (now.aside / "state.json").write_text(now.content, encoding="utf-8")
        write_manifest(now.aside)
        fsync_tree(now.aside)
        put_in_place(now.aside, self.folder / now.aside.stem)
        fsync_folder(self.folder)

    def _together[T](self, aside: Path, work: Callable[[], T]) -> T:
        """Return `work()`; an OSError or RuntimeError of any rank becomes a SaveError on all of them. It keeps no
        trace of its cause, whose frames may hold open files of a full disk."""
        error, result = "", None
        try:
            result = work()
        except (OSError, RuntimeError) as cause:
            error = _io_message(aside, cause)
        self._fail_together(error, aside)
        return result  # type: ignore[return-value]

    def _fail_together(self, error: str, aside: Path) -> None:
        try:
            fail_together(error, SaveError)
        except SaveError:
            if dist.get_rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def describe(self, step: int, name: str, content: Mapping[str, Any]) -> None:
        """Add a small file whose content is known only at the end of the run to the checkpoint of its last step, if
        there is one."""
        folder = self.folder / f"step-{step:08d}"

        def write() -> None:
            if dist.get_rank() == 0 and (folder / "state.json").exists():
                write_whole(folder / name, json.dumps(content, indent=2) + "\n")
                write_manifest(folder)
                fsync_folder(folder)

        self._together(folder.with_suffix(".tmp"), write)

    def restore(self, resume: str) -> int:
        """Load what `run.resume` names; return the step to continue after, 0 if there is nothing to resume.

        With `auto` a damaged newest checkpoint is reported, and the one before it is used. A path outside this run is
        where the run starts; once it has checkpoints of its own, those are continued.
        """
        candidates = by_rank_0(lambda: candidates_for(self.folder, resume))
        for i, path in enumerate(candidates):
            error: CheckpointError | None = None
            try:
                content = self._read(path)
                check_identity(path, content["identity"], self.identity)
                was = content.get("definition")
                changed = [] if self.definition is None else compare(path, was, self.definition, self.accept_changes)
                self._load(path, content, reordered(changed))
            except AnotherRunError:
                raise
            except CheckpointError as caught:
                error = caught
            first = first_cause("" if error is None else str(error))
            if first is None:
                by_rank_0(partial(keep_damaged, candidates[:i]))
                if self.definition is not None:
                    by_rank_0(partial(note, self.folder.parent, path, content["step"], was, changed))
                self.last_saved = self.committed = content["step"]
                return content["step"]
            if i + 1 == len(candidates):
                raise error or CheckpointError(f"on rank {first[0]}: {first[1]}")
            if dist.get_rank() == 0:
                print(f"WARNING: {first[1]}\nWARNING: using the checkpoint before it: {candidates[i + 1]}", flush=True)
        return 0

    def _read(self, path: Path) -> dict[str, Any]:
        """Read state.json, checked by rank 0 for all; the other nodes see the same folder."""
        content = by_rank_0(lambda: read_checked(path))
        same_view(path, lambda: view(path), by_node=True)
        return content

    def _load(self, path: Path, content: Mapping[str, Any], anew: Sequence[str]) -> None:
        """Load a checkpoint; states named in `anew` are not loaded."""
        missing = [name for name in self.state if name not in content["state"] and name not in DISPENSABLE]
        if missing:
            raise CheckpointError(
                f"checkpoint {path} lacks the state of {', '.join(missing)}: it was saved by a run of another kind "
                "(debug.train_only), or by another version of aligner. Start from its weights with model.init"
            )
        for name, model in self.models.items():
            load_model(model, path / name)
        for name, item in self.state.items():
            if name in content["state"] and name not in anew:
                item.load_state_dict(content["state"][name])
        rng = path / "rng" / f"rank-{dist.get_rank():04d}.pt"
        if rng.exists() and content["world_size"] == dist.get_world_size():
            set_rng_state(torch.load(rng, weights_only=True))


def _fresh_folder(aside: Path, models: Iterable[str]) -> None:
    """Make the folder with all folders that ranks write into: a rank that failed at this later would leave the others
    waiting."""
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        for name in ("rng", *models):
            (aside / name).mkdir(parents=True)


def _io_message(folder: Path, cause: BaseException) -> str:
    code = getattr(cause, "errno", None) or getattr(cause.__cause__, "errno", None)
    # writers in threads report no errno: a disk with less than a megabyte free shows the same
    full = code == errno.ENOSPC or (folder.exists() and shutil.disk_usage(folder).free < 1 << 20)
    hint = " (no space left)" if full else ""
    advice = "Earlier checkpoints are untouched; free space or change run.dir"
    what = str(cause) if isinstance(cause, OSError | RuntimeError) else f"{type(cause).__name__}: {cause}"
    return f"cannot write checkpoint {folder}{hint}: {what}. {advice}"
