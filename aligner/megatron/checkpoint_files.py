"""Where checkpoints lie: folders of whole checkpoints below a run folder, and the small state file of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError

NAME = re.compile(r"step-(\d{8})")


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all whole checkpoints below `folder`, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and (path / "state.json").exists():
            found.append((int(match[1]), path))
    return sorted(found)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint `path` means: itself, or the newest of a run folder or its `checkpoints` folder."""
    if (path / "state.json").exists():
        return path
    for folder in (path, path / "checkpoints"):
        found = complete_checkpoints(folder)
        if found:
            return found[-1][1]
    raise CheckpointError(f"{path}: expected a checkpoint, or a run folder with one (run.resume, model.init)")


def read_state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder / 'state.json'}: {error}") from error
