"""Rubrics: a row's criteria with points, and the score of a response that meets some of them.

The column `rubric` is a list of {criterion, points}, or its JSON. Negative points are penalties, for faults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aligner.errors import RewardError
from aligner.rewards.base import NotApplicable
from aligner.types import Prompt

COLUMN = "rubric"
EXPECTED = "expected a list of {criterion: text, points: number}, some points above 0, in the column `rubric`"


class Criterion(NamedTuple):
    text: str
    points: float


def criteria(fields: Mapping[str, Any]) -> list[Criterion] | None:
    """Return a row's criteria, None where its rubric is null. Raises RewardError if the column is not a rubric."""
    if COLUMN not in fields:
        columns = ", ".join(fields) or "none"
        raise RewardError(f"{EXPECTED}, found the columns prompt, {columns} (data.columns={{rubric: theirs}})")
    value = fields[COLUMN]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RewardError(f"{EXPECTED}, found a text that is not JSON ({error}): {fields[COLUMN]!r:.80}") from None
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise RewardError(f"{EXPECTED}, found {value!r:.80}")
    rubric = [_criterion(number, each) for number, each in enumerate(value, start=1)]
    if not any(criterion.points > 0 for criterion in rubric):
        raise RewardError(f"{EXPECTED}, found only the points {', '.join(f'{each.points:g}' for each in rubric)}")
    return rubric


def _criterion(number: int, value: Any) -> Criterion:
    entry = value if isinstance(value, Mapping) else {}
    text, points = entry.get("criterion"), entry.get("points")
    if not isinstance(text, str) or not text.strip():
        raise RewardError(f"{EXPECTED}, found in criterion {number} {value!r:.80}")
    if isinstance(points, bool) or not isinstance(points, int | float) or not math.isfinite(points):
        raise RewardError(f"{EXPECTED}, found in criterion {number} points={points!r:.80}")
    return Criterion(text, float(points))


def unreadable_rubrics(prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return by index why rows have no rubric."""
    why: dict[int, str] = {}
    for index, prompt in enumerate(prompts):
        try:
            if criteria(prompt.fields) is None:
                why[index] = NotApplicable(f"{EXPECTED}, found null")
        except RewardError as error:
            why[index] = str(error)
    return why


def rubric_score(rubric: Sequence[Criterion], met: Sequence[float | None]) -> float | None:
    """Return the sum of points x met / sum of positive points, within [0, 1] (HealthBench, arXiv:2505.08775).

    `met`: by criterion 1, 0, or the share of votes between. Without a rubric, or with a criterion that has no answer:
    None. With a failed request: NaN.
    """
    if any(one is not None and math.isnan(one) for one in met):
        return math.nan
    if not rubric or None in met:
        return None
    gained = math.fsum(criterion.points * one for criterion, one in zip(rubric, met, strict=True) if one is not None)
    return min(max(gained / math.fsum(max(criterion.points, 0.0) for criterion in rubric), 0.0), 1.0)
