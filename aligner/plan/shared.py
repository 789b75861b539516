"""Rows of a micro-batch that begin with the same prompt (`batch.share_prompts`). Their prompt is computed once, and
attention gets the keys and values of each row put together (`ops/packing/pack.py`).

Numbers are those of rows of the longest length, which need most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from aligner.config.stages import STAGES
from aligner.plan.job import PlanJob

SHORTEST, SHARED_MASK = 4, 1 << 28  # as in `ops/packing/pack.py`, which imports torch


@dataclass(frozen=True)
class Shared:
    """Tokens of a micro-batch with shared prompts."""

    tokens: float  # that are computed
    leaders: float  # tokens of the rows that have their prompt, a copy of whose keys and values attention gets
    followers: float  # tokens of all others, each with the keys and values of a prompt
    mask: float  # numbers that say what followers see


def shared(job: PlanJob, tokens: float, micro_batches: int, in_order: bool) -> Shared | None:
    """Return the shared tokens of a micro-batch of `tokens` with prompts counted each time, one of `parts`; None where
    nothing is shared. `in_order`: its rows follow each other, else rows are dealt to micro-batches by their length."""
    rows = job.rows
    count, prompt, own = tokens / rows.longest, rows.prompt_longest, rows.response_longest
    if not job.share or prompt < SHORTEST or 3 * prompt < own:  # less than a quarter of a row
        return None
    prompts = min(count, _prompts(job, count, micro_batches, in_order))
    saved = (count - prompts) * prompt
    masks = not job.policy.shape.varlen_on_gpu
    if 10 * saved < tokens or (masks and tokens * own > SHARED_MASK):
        return None
    followers = tokens - prompts * rows.longest
    return Shared(tokens - saved, prompts * rows.longest, followers, masks * followers * own)


def _prompts(job: PlanJob, count: float, micro_batches: int, in_order: bool) -> float:
    """Count the distinct prompts of so many rows."""
    if not job.rollout or STAGES[job.stage].pairs:  # the two of a pair stay together
        return ceil(count / (2 if STAGES[job.stage].pairs else job.rows.count / job.rows.prompts))
    together = max(1, job.rows.count / job.rows.prompts / job.minibatches)  # rows of a prompt in a minibatch
    return ceil(count / (together if in_order else max(1, together // micro_batches)))
