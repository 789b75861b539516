"""Tokens whose outputs nobody reads, in numbers. The trainer makes no logits that no loss asks for. Its last layer
computes only queries, keys and values for tokens of a row outside the first to the last token that is read
(`ops/packing/needed.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.stages import STAGES
from aligner.plan.job import PlanJob, PlannedModel

LAST_LAYER_MASK, WORTH = 1 << 26, 0.9  # as in `ops/packing/needed.py`, which imports torch


@dataclass(frozen=True)
class ReadTokens:
    """Tokens of a micro-batch whose outputs are read, over context-parallel ranks."""

    pairs: float  # whose output is read, and logits made
    kept: float  # that the last layer computes whole
    context: float  # tokens that one of the kept sees on average


def reads(job: PlanJob, model: PlannedModel, tokens: float) -> ReadTokens:
    """Count the tokens that are read. A reward model reads the last token of each row, every other model the token
    before each one of the response."""
    rows, grid = job.rows, job.grid
    last = model.name == "reward" or STAGES[job.stage].scores
    each = 1.0 if last else rows.response_mean
    pairs = tokens * each / (rows.mean if job.packing else rows.longest)
    elsewhere = grid.context > 1 or grid.sequence or not model.shape.narrows
    too_large = not model.shape.varlen_on_gpu and pairs * rows.mean > LAST_LAYER_MASK
    if elsewhere or pairs > WORTH * tokens or too_large:
        return ReadTokens(pairs, tokens, rows.context)
    return ReadTokens(pairs, pairs, rows.read_seen or (rows.mean if last else rows.prompt_mean + each / 2))


def most_read(job: PlanJob, tokens: float, rows: float) -> float:
    """Return the largest number of read tokens among `tokens` of `rows` rows of any lengths."""
    return min(tokens, rows * job.rows.response_longest)
