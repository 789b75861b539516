"""Paths of checkpoints: folders of complete checkpoints below a run folder, and the small files of each."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError
from aligner.files import file_hash, write_whole
from aligner.foreign import read_record

MANIFEST = "manifest.json"
FORMAT = 2  # of state.json; since 2 a checkpoint has a manifest
NAME = re.compile(r"step-(\d{8})")


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of all complete checkpoints below `folder`, oldest first."""
    checkpoints = []
    for path in folder.glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and (path / "state.json").exists():
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def warn_without_state(folder: Path) -> None:
    """Print a line for each folder that has a checkpoint's name but no state.json."""
    for path in sorted(folder.glob("step-*")):
        if NAME.fullmatch(path.name) and not (path / "state.json").exists():
            print(f"WARNING: {path} has no state.json: it is not a checkpoint and is ignored", flush=True)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest of a run folder or its `checkpoints` folder."""
    if (path / "state.json").exists():
        return path
    for folder in (path, path / "checkpoints"):
        warn_without_state(folder)
        checkpoints = complete_checkpoints(folder)
        if checkpoints:
            return checkpoints[-1][1]
    raise CheckpointError(f"{path}: expected a checkpoint, or a run folder with one (run.resume, model.init)")


def read_state(folder: Path) -> dict[str, Any]:
    """Read state.json. Raises CheckpointError if it cannot be read or lacks what every checkpoint has."""
    try:
        record = read_record(folder / "state.json", CheckpointError, nan=True)  # metrics may be
        record.integer("step")
        record.integer("world_size", low=1)
        version = record.integer("format", 1, low=1, high=FORMAT)
        record.record("state")
        record.record("identity").text("stage")
        if "metric" in record and not isinstance(record.fields["metric"], int | float):
            record.refuse("metric", "a number")
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {folder / 'state.json'}: {error}") from None
    return {"metric": None} | record.fields | {"format": version}


def read_checked(folder: Path) -> dict[str, Any]:
    """Read state.json after checking the checkpoint's small files against the manifest. Raises CheckpointError."""
    content = read_state(folder)
    if content["format"] >= FORMAT or (folder / MANIFEST).exists():
        check_manifest(folder)
    return content


def write_manifest(folder: Path) -> None:
    """Write checksums of the small files. Each model's `integrity.json` is among them, which has those of the large
    files."""
    names = [*folder.glob("*.json"), *folder.glob("*/integrity.json"), *folder.glob("rng/*")]
    files = {str(path.relative_to(folder)): file_hash(path) for path in sorted(names) if path.name != MANIFEST}
    write_whole(folder / MANIFEST, json.dumps({"algorithm": "sha256", "files": files}, indent=1))


def check_manifest(folder: Path) -> None:
    """Check the manifest's files. Raises CheckpointError naming the first that does not match its checksum."""
    try:
        files = read_record(folder / MANIFEST, CheckpointError).text_map("files")
        wrong = next((name for name, digest in files.items() if file_hash(folder / name) != digest), None)
        if wrong is None and "state.json" not in files:
            raise CheckpointError("it has no checksum of state.json")
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"cannot read {folder / MANIFEST}, or a file that it names: {error}") from error
    if wrong is not None:
        raise CheckpointError(f"cannot load checkpoint {folder}: {wrong} does not have the checksum of {MANIFEST}")


def view(folder: Path) -> dict[str, str]:
    """Return file -> hash of a checkpoint without reading its weights; for weights and random states the size. Ranks
    with equal views read the same checkpoint: the small files hold the hashes of the large ones."""
    files = {}
    try:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                large = path.suffix == ".distcp" or path.parent.name == "rng"
                name = str(path.relative_to(folder))
                files[name] = f"of {path.stat().st_size} bytes" if large else file_hash(path)[:16]
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {error}") from error
    return files


def remove_whole(folder: Path) -> None:
    """Delete a checkpoint so that half of one is never taken for a complete one, even if interrupted. A link is
    removed as a link. Raises OSError if something cannot be deleted; the rest then has another name and is no
    checkpoint."""
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(folder.name + ".deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def put_in_place(aside: Path, final: Path) -> None:
    """Rename a complete folder to its final path. A damaged folder or dangling link at that path is removed."""
    if final.exists() or final.is_symlink():
        try:
            remove_whole(final)
        except OSError:
            if final.exists():  # it could not even be moved away
                raise
    aside.rename(final)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    for path in [*folder.glob("step-*.tmp"), *folder.glob("step-*.deleting")]:
        shutil.rmtree(path, ignore_errors=True)
