"""Any reasoning-gym task as a reward, by the task's own scorer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

from aligner.errors import MissingExtraError, RewardError
from aligner.rewards.verifiable import reference
from aligner.types import Sample


def reasoning_gym(
    samples: Sequence[Sample], task: str | None = None, field: str = "entry", tag: str = ""
) -> list[float | None]:
    """Return `score_answer(response, entry)` of the task, in [0, 1].

    `field` is the column with the task's entry: a mapping (question, answer, metadata) or its JSON text. `task` is
    the name of the task; without it, the entry's metadata.source_dataset. With `tag`, only the text of the last
    <tag>...</tag> in the response is the answer (none: 0.0). Leading and trailing white space is removed.
    """
    return [_score_one(sample, task, field, tag) for sample in samples]


def _score_one(sample: Sample, task: str | None, field: str, tag: str) -> float | None:
    entry = reference(sample.prompt, field)
    if entry is None:
        return None
    if isinstance(entry, str):
        entry = json.loads(entry)
    name = task or (entry.get("metadata") or {}).get("source_dataset")
    if not name:
        raise RewardError("args.task=None: expected a task name, because the entry has no metadata.source_dataset")
    return float(_scorer(name)(_answer(sample.response, tag), entry))


def _answer(response: str, tag: str) -> str | None:
    if not tag:
        return response.strip()
    from reasoning_gym.utils import extract_answer

    return extract_answer(response, tag_name=tag)


@functools.cache
def _scorer(task: str) -> Callable:
    """Return the bound `score_answer` of a task's dataset object, made once: some tasks load word lists."""
    try:
        import reasoning_gym as _  # noqa: F401  registers the tasks
    except ImportError as cause:
        raise MissingExtraError("reasoning_gym", "reasoning-gym", "the reward `reasoning_gym`") from cause
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS:
        raise RewardError(f"args.task={task!r}: expected one of reasoning-gym's {len(DATASETS)} tasks")
    return get_score_answer_fn(task)
