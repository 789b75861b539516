"""What a reward is, and what counts as a score.

A reward scores a batch of samples: one number for each, or None where it does not apply (a math checker on a row
without an answer). A component that is None is simply not part of that sample's sum.

Optional attributes of a reward object change how `RewardPipeline` runs it:
    per_sample   True: each sample is scored for itself, so the batch may be cut into chunks that run side by side, and
                 samples may be scored while others are still generated (reward.overlap)
                 (default: the reward sees the whole batch of this rank, group-major, and may compare samples)
    main_thread  True: run in the caller's thread, in order (a model whose forward uses collectives); such a reward
                 has no timeout of its own
    late_score   of a function that limits the time of each sample itself: what has begun and is not ready at
                 reward.timeout_s gets this score, what has not begun makes its sample invalid; both are counted
                 (reward/<name>/late), and none ends the run
    bounded      True: the function limits the time of each sample itself, and has a score where it is over; all of its
                 samples are waited for, reward.timeout_s does not apply
    best_score   the largest that it can give: where that is less than eval.full_score, eval/accuracy does not ask it
    may_fail     True: NaN is an answer, too: the sample could not be scored, for a reason that is not its own, and is
                 invalid, whatever other functions say. More of these than reward.max_invalid_fraction end the run,
                 with the words of its method `failure`
    take_counts  a method: name -> (numerator, denominator) since the last call, for the metric reward/<reward>/<name>
    keep_answers  a method: (log, name) -> None; the log of outside answers, which is to be read before anyone is asked
    checks_rows  True: its method `unreadable` is called with prompts before training; {place: why} of the rows that it
                 cannot score. A `why` that is NotApplicable refuses a row only where no other reward scores it
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Protocol

from aligner.errors import RewardError
from aligner.types import Sample


class NotApplicable(str):
    """Why a reward has nothing to say of a row: it would score None."""


class Reward(Protocol):
    name: str

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]: ...


def describe(sample: Sample) -> str:
    """The words by which error messages point at a sample."""
    return f"prompt {sample.prompt.id}, sample {sample.index}, response {sample.response[:200]!r}"


def scores_of(reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
    return check_scores(reward.name, reward(samples), samples, getattr(reward, "may_fail", False))


def check_scores(name: str, values: Any, samples: Sequence[Sample], may_fail: bool = False) -> list[float | None]:
    """One finite float or None per sample (NaN where it `may_fail`), or a RewardError that names the function and the
    sample.

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
