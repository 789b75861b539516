"""A run that goes on is compared with its checkpoint: what defines it may not have changed unnoticed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.config.identity import CONTENT, Change, changes
from aligner.config.key import IGNORE, REFUSE, REPORT
from aligner.errors import CheckpointError
from aligner.run.metrics import append_jsonl, read_jsonl

FILE = "changes.jsonl"  # in the run folder: one record for each start that changed something
# state that has row numbers -> whose changes may give these other rows
ROWS = {
    stream: (f"{CONTENT}{data}.train", f"{CONTENT}{data}.sources", data)
    for stream, data in (("data", "data"), ("clock", "data"), ("ptx", "ptx.data"))
}


class AnotherRunError(CheckpointError):
    """A whole checkpoint, but of a run of another definition: no older one will do instead."""


def check_identity(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises AnotherRunError where checkpoint `path` lacks what no flag changes: stage, shape, tokenizer."""
    for key, expected in here.items():
        difference = _difference(key, there.get(key), expected)
        if difference:
            raise AnotherRunError(
                f"checkpoint {path} belongs to another run: {difference}. Choose another run.dir, or run.resume=never"
            )


def _difference(key: str, there: Any, here: Any) -> str:
    """`key is A there, B here` for each value that differs; of sections only the entries that do."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        names = [*here, *(name for name in there if name not in here)]
        parts = (_difference(f"{key}.{name}", there.get(name), here.get(name)) for name in names)
        return ", ".join(part for part in parts if part)
    return "" if there == here else f"{key} is {there!r} there, {here!r} here"


def compare(path: Path, was: Mapping[str, Any] | None, now: Mapping[str, Any], accept: bool) -> list[Change]:
    """What this start changes. `was` is the definition in checkpoint `path`, None in those of earlier versions. Raises
    AnotherRunError for changes that define another run, unless they are accepted."""
    if was is None:
        return []
    found = [change for change in changes(was, now) if change.effect != IGNORE]
    refused = [change for change in found if change.effect == REFUSE]
    if refused and not accept:
        texts = ", ".join(f"{change.key} is {change.was!r} there, {change.now!r} here" for change in refused)
        raise AnotherRunError(
            f"checkpoint {path} belongs to another run: {texts}. Restore what was, go on with what is by "
            "run.accept_changes=true, or choose another run.dir or run.resume=never"
        )
    return found


def reordered(found: Sequence[Change]) -> list[str]:
    """The streams whose row numbers may mean other rows than before."""
    keys = [f"{change.key}." for change in found if change.effect == REFUSE]
    return [name for name, parts in ROWS.items() if any(k.startswith(f"{part}.") for k in keys for part in parts)]


def note(run_dir: Path, path: Path, step: int, was: Mapping[str, Any] | None, found: Sequence[Change]) -> None:
    """A line for what is taken over, and one for what was accepted; noted once in changes.jsonl. On rank 0."""
    if was is None:
        print(f"{path} says not what run it is of (an earlier version wrote it): changes are not noticed", flush=True)
    accepted = [change for change in found if change.effect == REFUSE]
    told = [change for change in found if change.effect == REPORT]
    if accepted:
        print(f"run.accept_changes: from step {step} on {', '.join(map(str, accepted))}", flush=True)
    for data in dict.fromkeys(ROWS[name][-1] for name in reordered(found)):
        print(f"run.accept_changes: the rows of {data} are taken from their first on", flush=True)
    if told:
        print(f"changed from step {step} on: {', '.join(map(str, told))}", flush=True)
    if found:
        notes = {
            name: [{"key": change.key, "was": change.was, "now": change.now} for change in part]
            for name, part in (("accepted", accepted), ("told", told))
        }
        record = {"step": step} | notes
        before = read_jsonl(run_dir / FILE)
        if not before or {name: before[-1][name] for name in record} != record:  # killed before the next checkpoint
            append_jsonl(run_dir / FILE, [record | {"time": round(time.time(), 3)}])
