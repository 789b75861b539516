"""Answers with labels and mismatched answers: the reference's logprobs, and z0."""

from __future__ import annotations

import torch

from aligner.ops.reduce import sum_over
from aligner.ops.rl.kto import log_ratios
from aligner.roles.policy import Policy, Reference
from aligner.types import LabelTargets, TrainBatch


def with_reference(rows: TrainBatch, reference: Reference | None) -> tuple[TrainBatch, TrainBatch]:
    """Return the answers, and the mismatched ones or no row, of rows as of `collate_unpaired`. Both have
    ref_logprobs: the stored ones, or those of `reference`."""
    known = rows.of(LabelTargets)
    other = known.labels[:, 1] == 1
    unit = 2 if other.any() else 1  # adjacent rows with one prompt
    if known.ref_logprobs is None:
        assert reference is not None
        rows = rows.with_payloads(LabelTargets(known.labels, reference.logprobs(rows, rows.loss_mask, unit)))
        return tuple(rows.select(at.nonzero().flatten()).trim() for at in (~other, other))
    answers, mismatched = (rows.select(at.nonzero().flatten()).trim() for at in (~other, other))
    if reference is not None:
        mismatched.of(LabelTargets).ref_logprobs = reference.logprobs(mismatched, mismatched.loss_mask)
    return answers, mismatched


def zero_point(policy: Policy, mismatched: TrainBatch) -> float:
    """Return z0: the mean log-ratio of all ranks' mismatched answers, at least 0; 0 if there are none. Collective
    over data-parallel ranks, which may have different numbers of rows."""
    logprobs, group = policy.logprobs(mismatched, mismatched.loss_mask), policy.model.layout.pgs.dp
    each = log_ratios(logprobs, mismatched.of(LabelTargets).ref_logprobs, mismatched.loss_mask).double()
    total, count = sum_over(torch.tensor([each.sum(), len(each)], dtype=torch.float64), group).tolist()
    return max(0.0, total / count) if count else 0.0
