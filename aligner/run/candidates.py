"""Choice of the checkpoint from which a start resumes, and folders for the others: nothing is deleted. It runs only
on rank 0, as ranks that list a folder separately may see different ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from aligner.megatron.checkpoint_files import (
    complete_checkpoints,
    find_checkpoint,
    remove_unfinished,
    warn_without_state,
)
from aligner.run.metrics import unwritable


def candidates_for(folder: Path, resume: str) -> list[Path]:
    """Return the checkpoints to resume from in the `checkpoints` folder of a run, best first. Others are moved, so
    that nobody takes them for this run's."""
    remove_unfinished(folder)
    if resume == "never":
        _set_aside(folder)
        return []
    warn_without_state(folder)
    candidates = [path for _, path in reversed(complete_checkpoints(folder))]
    if resume == "auto":
        return candidates
    chosen = find_checkpoint(Path(resume))
    if chosen.resolve().parent == folder.resolve():
        _abandon_after(folder, chosen)
        return [chosen]
    return [*candidates, chosen]  # this run's own checkpoints continue the one it started from


def keep_damaged(damaged: Sequence[Path]) -> None:
    """Rename damaged checkpoints, so that they are neither resumed nor count among the last few, which would delete
    complete ones."""
    for old in damaged:
        kept = old.with_name(f"damaged-{old.name}")
        shutil.rmtree(kept, ignore_errors=True)
        _keep_as(old.parent, old, kept)
        print(f"WARNING: the damaged checkpoint is kept as {kept}", flush=True)


def _abandon_after(folder: Path, chosen: Path) -> None:
    """Rename checkpoints later than the chosen one of this run: they are neither resumed nor count as the last."""
    for _, path in complete_checkpoints(folder):
        if path.name > chosen.name:
            _keep_as(folder, path, path.with_name(f"abandoned-{path.name}"))
            print(f"run.resume={chosen}: {path.name} is kept as abandoned-{path.name}", flush=True)


def _set_aside(folder: Path) -> None:
    """Rename the folder before a fresh start: older checkpoints must not be taken for this run's when it resumes."""
    if complete_checkpoints(folder):
        number = 1
        while (kept := folder.with_name(f"checkpoints.old-{number}")).exists():
            number += 1
        _keep_as(folder, folder, kept)
        print(f"run.resume=never: earlier checkpoints are kept in {kept}", flush=True)


def _keep_as(folder: Path, path: Path, kept: Path) -> None:
    try:
        path.rename(kept)
    except OSError as cause:
        raise unwritable(folder, cause) from cause
