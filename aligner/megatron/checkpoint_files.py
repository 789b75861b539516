"""Where checkpoints lie: folders of whole checkpoints below a run folder, and the small files of each."""

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
    """(step, folder) of all whole checkpoints below `folder`, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and (path / "state.json").exists():
            found.append((int(match[1]), path))
    return sorted(found)


def tell_without_state(folder: Path) -> None:
    """A line for each folder that is named as a checkpoint and is none: something has taken its state.json."""
    for path in sorted(folder.glob("step-*")):
        if NAME.fullmatch(path.name) and not (path / "state.json").exists():
            print(f"WARNING: {path} has no state.json: it is no checkpoint, and is passed over", flush=True)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint `path` means: itself, or the newest of a run folder or its `checkpoints` folder."""
    if (path / "state.json").exists():
        return path
    for folder in (path, path / "checkpoints"):
        tell_without_state(folder)
        found = complete_checkpoints(folder)
        if found:
            return found[-1][1]
    raise CheckpointError(f"{path}: expected a checkpoint, or a run folder with one (run.resume, model.init)")


def read_state(folder: Path) -> dict[str, Any]:
    """state.json. Raises CheckpointError if it cannot be read or lacks what every checkpoint has."""
    try:
        found = read_record(folder / "state.json", CheckpointError, nan=True)  # metrics may be
        found.integer("step")
        found.integer("world_size", low=1)
        version = found.integer("format", 1, low=1, high=FORMAT)
        found.record("state")
        found.record("identity").text("stage")
        if "metric" in found and not isinstance(found.fields["metric"], int | float):
            found.refuse("metric", "a number")
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {folder / 'state.json'}: {error}") from None
    return {"metric": None} | found.fields | {"format": version}


def read_checked(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose small files are what was written. Raises CheckpointError."""
    content = read_state(folder)
    if content["format"] >= FORMAT or (folder / MANIFEST).exists():
        check_manifest(folder)
    return content


def write_manifest(folder: Path) -> None:
    """Checksums of the small files, `integrity.json` of each model included, which has those of the large ones."""
    names = [*folder.glob("*.json"), *folder.glob("*/integrity.json"), *folder.glob("rng/*")]
    files = {str(path.relative_to(folder)): file_hash(path) for path in sorted(names) if path.name != MANIFEST}
    write_whole(folder / MANIFEST, json.dumps({"algorithm": "sha256", "files": files}, indent=1))


def check_manifest(folder: Path) -> None:
    """Raises CheckpointError naming the first file that is not what was written."""
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
    """What there is to see of a checkpoint without reading its weights: file -> hash, of weights and random states the
    size. Ranks that see the same read the same checkpoint: the small files hold the hashes of the large ones."""
    found = {}
    try:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                large = path.suffix == ".distcp" or path.parent.name == "rng"
                name = str(path.relative_to(folder))
                found[name] = f"of {path.stat().st_size} bytes" if large else file_hash(path)[:16]
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {error}") from error
    return found


def remove_whole(folder: Path) -> None:
    """Delete a checkpoint: never is half of one taken for a whole, whenever this is interrupted. A link goes as a link.
    Raises OSError where something cannot be deleted; what then remains under another name is none any more."""
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(folder.name + ".deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def put_in_place(aside: Path, final: Path) -> None:
    """Rename a whole folder to its place; what stood there (a damaged one, a link to nowhere) goes."""
    if final.exists() or final.is_symlink():
        try:
            remove_whole(final)
        except OSError:
            if final.exists():  # it could not even be moved away
                raise
    aside.rename(final)


def remove_unfinished(folder: Path) -> None:
    """What a killed process left half-written or half-deleted."""
    for path in [*folder.glob("step-*.tmp"), *folder.glob("step-*.deleting")]:
        shutil.rmtree(path, ignore_errors=True)
