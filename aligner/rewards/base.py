"""Rewards, and the check of their scores.

A reward scores a batch of samples: one number for each, or None where it does not apply (a math checker on a row
without an answer). A None is left out of that sample's weighted sum.

Optional attributes of a reward object change how `RewardPipeline` runs it:
    per_sample   True: each sample is scored independently, so chunks of the batch may run concurrently, and
                 samples may be scored while others are still generated (reward.overlap)
                 (default: the reward sees the whole batch of this rank, group-major, and may compare samples)
    main_thread  True: run in the caller's thread, in order (a model whose forward uses collectives); such a reward
                 has no timeout of its own
    late_score   of a function that limits the time of each sample: a sample that has begun and is not ready at
                 reward.timeout_s gets this score, one that has not begun is invalid; both are counted
                 (reward/<name>/late), and neither ends the run
    bounded      True: the function limits the time of each sample, and scores a sample whose time is over; the
                 pipeline waits for all samples, and reward.timeout_s does not apply
    best_score   the largest possible score: if it is less than eval.full_score, eval/accuracy ignores the reward
    may_fail     True: NaN is allowed: the sample could not be scored for an external reason and is invalid,
                 independent of other scores. More of these than reward.max_invalid_fraction end the run with the
                 text of its method `failure`
    take_counts  a method: name -> (numerator, denominator) since the last call, for the metric reward/<reward>/<name>
    keep_answers  a method: (log, name) -> None; sets the log of outside answers, to read before each request
    checks_rows  True: its method `unreadable` is called with prompts before training; returns {index: why} of the rows
                 that it cannot score. A `why` that is NotApplicable refuses a row only if no other reward scores it
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Protocol

from aligner.errors import RewardError
from aligner.types import Sample


class NotApplicable(str):
    """A reason why a reward does not apply to a row: it would score None."""


class Reward(Protocol):
    name: str

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]: ...


def describe(sample: Sample) -> str:
    """Return the text with which error messages identify a sample."""
    return f"prompt {sample.prompt.id}, sample {sample.index}, response {sample.response[:200]!r}"


def scores_of(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    return check_scores(reward.name, reward(samples), samples, getattr(reward, "may_fail", False))


def check_scores(name: str, values: Any, samples: Sequence[Sample], may_fail: bool = False) -> list[float | None]:
    """Return one finite float or None per sample (NaN where it `may_fail`). Raises RewardError, which names the
    function and the sample.

    Lists, tuples, arrays and tensors are accepted; numbers may be of any real type.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"reward `{name}` returned {type(values).__name__} {str(values)[:80]!r}: "
            f"expected a list with one number or None for each of the {len(samples)} samples"
        )
    if len(values) != len(samples):
        raise RewardError(
            f"reward `{name}` returned {len(values)} scores: expected {len(samples)}, one for each sample"
        )
    return [_score(name, value, sample, may_fail) for value, sample in zip(values, samples, strict=True)]


def _score(name: str, value: Any, sample: Sample, may_fail: bool) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()  # a 0-d tensor or array
    if may_fail and isinstance(value, float) and math.isnan(value):
        return value
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"reward `{name}` returned {value!r} on {describe(sample)}: expected a finite number or None")
    return float(value)
