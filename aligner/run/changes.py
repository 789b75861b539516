"""Comparison of a resumed run with its checkpoint: its definition may not change unnoticed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.config.identity import CONTENT, Change, changes
from aligner.config.key import IGNORE, REFUSE, REPORT
from aligner.errors import CheckpointError
from aligner.run.metrics import append_jsonl, read_jsonl

FILE = "changes.jsonl"  # in the run folder: one record for each start with a change
# state with row numbers -> the keys whose changes may give these numbers other rows
ROWS = {
    stream: (f"{CONTENT}{data}.train", f"{CONTENT}{data}.sources", data)
    for stream, data in (("data", "data"), ("clock", "data"), ("ptx", "ptx.data"))
}


class AnotherRunError(CheckpointError):
    """A complete checkpoint of a run of another definition: no older one will do instead."""


def check_identity(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that checkpoint `path` has what no flag may change: stage, shape, tokenizer. Raises AnotherRunError."""
    for key, expected in here.items():
        difference = _difference(key, there.get(key), expected)
        if difference:
            raise AnotherRunError(
                f"checkpoint {path} belongs to another run: {difference}. Choose another run.dir, or run.resume=never"
            )


def _difference(key: str, there: Any, here: Any) -> str:
    """Return `key is A there, B here` for each value that differs; of sections only the differing entries."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        names = [*here, *(name for name in there if name not in here)]
        parts = (_difference(f"{key}.{name}", there.get(name), here.get(name)) for name in names)
        return ", ".join(text for text in parts if text)
    return "" if there == here else f"{key} is {there!r} there, {here!r} here"


def compare(path: Path, was: Mapping[str, Any] | None, now: Mapping[str, Any], accept: bool) -> list[Change]:
    """Return the changes of this start. `was` is the definition in checkpoint `path`, None in those of earlier
    versions. Raises AnotherRunError for changes that define another run, unless they are accepted."""
    if was is None:
        return []
    changed = [change for change in changes(was, now) if change.effect != IGNORE]
    refused = [change for change in changed if change.effect == REFUSE]
    if refused and not accept:
        texts = ", ".join(f"{change.key} is {change.was!r} there, {change.now!r} here" for change in refused)
        raise AnotherRunError(
            f"checkpoint {path} belongs to another run: {texts}. Restore the old values, accept the new ones with "
            "run.accept_changes=true, or choose another run.dir or run.resume=never"
        )
    return changed


def reordered(changed: Sequence[Change]) -> list[str]:
    """Return the streams whose row numbers may mean other rows than before."""
    keys = [f"{change.key}." for change in changed if change.effect == REFUSE]
    return [name for name, parts in ROWS.items() if any(k.startswith(f"{root}.") for k in keys for root in parts)]


def note(run_dir: Path, path: Path, step: int, was: Mapping[str, Any] | None, changed: Sequence[Change]) -> None:
    """Print a line of reported changes, and one of accepted ones, and note them once in changes.jsonl. On rank 0."""
    if was is None:
        print(f"{path} lacks its run's definition (an earlier version wrote it): changes are not detected", flush=True)
    accepted = [change for change in changed if change.effect == REFUSE]
    reported = [change for change in changed if change.effect == REPORT]
    if accepted:
        print(f"run.accept_changes: from step {step} on {', '.join(map(str, accepted))}", flush=True)
    for data in dict.fromkeys(ROWS[name][-1] for name in reordered(changed)):
        print(f"run.accept_changes: the rows of {data} start again with the first", flush=True)
    if reported:
        print(f"changed from step {step} on: {', '.join(map(str, reported))}", flush=True)
    if changed:
        notes = {
            name: [{"key": change.key, "was": change.was, "now": change.now} for change in entries]
            for name, entries in (("accepted", accepted), ("told", reported))
        }
        record = {"step": step} | notes
        before = read_jsonl(run_dir / FILE)
        if not before or {name: before[-1][name] for name in record} != record:  # killed before the next checkpoint
            append_jsonl(run_dir / FILE, [record | {"time": round(time.time(), 3)}])
