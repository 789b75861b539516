"""Rows from the procedural tasks of `reasoning-gym`, split into sets that cannot share a question."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.errors import DataError, MissingExtraError

DRAWS_PER_ROW = 20  # a small task repeats itself: give up after this many draws per wanted row


def generate(task: str, size: int, seed: int, **config: Any) -> list[dict[str, Any]]:
    """Return `size` rows {prompt, answer, entry, task} with different questions; the task's scorer needs `entry`.

    Row i depends on (task, config, seed) only. Raises DataError for an unknown task or option, an entry that JSON
    cannot hold, or if the task does not have `size` different questions."""
    try:
        import reasoning_gym
    except ImportError as cause:
        raise MissingExtraError("reasoning_gym", "reasoning-gym", f"the task {task!r}") from cause
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DataError(f"reasoning-gym task {task!r}: expected one of {', '.join(sorted(DATASETS))}")
    draws = size * DRAWS_PER_ROW
    try:
        source = reasoning_gym.create_dataset(task, seed=seed, size=draws, **config)
    except (TypeError, AssertionError, ValueError) as error:  # its configs check themselves with assert
        raise DataError(f"reasoning-gym task {task!r}: expected other options than {config} ({error})") from error
    rows: dict[str, dict[str, Any]] = {}
    for index in range(draws):
        if len(rows) >= size:
            break
        entry = source[index]
        question = entry["question"]
        if question not in rows:
            if not rows:
                _check_scorer(source, entry, task)
            rows[question] = {"prompt": question, "answer": entry["answer"], "entry": _plain(entry, task), "task": task}
    if len(rows) < size:
        raise DataError(
            f"reasoning-gym task {task!r} with {config}: expected {size} different questions, "
            f"found {len(rows)} in {draws} draws; ask for fewer, or for larger problems"
        )
    return list(rows.values())


def _plain(entry: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the entry as read from JSON, so that a row is the same before and after it was written."""
    try:
        return json.loads(json.dumps(entry))
    except (TypeError, ValueError) as error:
        raise DataError(f"reasoning-gym task {task!r}: expected entries that JSON can hold ({error})") from error


def _check_scorer(source: Any, entry: dict[str, Any], task: str) -> None:
    """Check that the scorer accepts entries from JSON: a few compare with tuples, which become lists there."""
    expected, from_file = (source.score_answer(entry["answer"], e) for e in (entry, _plain(entry, task)))
    if expected != from_file:
        raise DataError(
            f"reasoning-gym task {task!r}: expected a scorer that gives a written row the same score, "
            f"found {from_file} instead of {expected}; this task cannot be used from a file"
        )


def split(rows: Iterable[dict[str, Any]], fractions: Mapping[str, float]) -> dict[str, list[dict[str, Any]]]:
    """Return rows by split name, chosen only by a hash of the question.

    The same question is in the same split with any seed or size, as long as `fractions` stays the same."""
    if not fractions or min(fractions.values()) < 0 or abs(sum(fractions.values()) - 1) > 1e-9:
        raise DataError(f"fractions={dict(fractions)}: expected numbers >= 0 that sum to 1")
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in fractions}
    last = [name for name, share in fractions.items() if share > 0][-1]
    for row in rows:
        point = int.from_bytes(hashlib.sha256(row["prompt"].encode()).digest()[:8], "big") / 2**64
        edge = 0.0
        for name, share in fractions.items():
            edge += share
            if point < edge or name == last:  # `last`: the sum may round to just below 1
                parts[name].append(row)
                break
    return parts


def write_jsonl(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Write one JSON object per line, and create parent folders."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
