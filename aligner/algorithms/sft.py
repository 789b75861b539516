"""Supervised fine-tuning: cross-entropy on the tokens of the answers.

rows of the step -> forward, loss, backward -> optimizer step
"""

from __future__ import annotations

from aligner.algorithms.losses import sft_loss
from aligner.data.batches import BatchSource
from aligner.roles.policy import Policy
from aligner.run.loop import Run


def sft(run: Run, policy: Policy, batches: BatchSource) -> None:
    group = policy.model.layout.pgs.dp
    for step in run.steps():
        batch = batches.next()
        with run.timers("update"):
            stats = policy.update(batch, sft_loss(batch, group))
        rows = len(batch.lengths) * group.size()
        run.finish(step, stats | batches.metrics(), tokens=float(batch.lengths.sum()) * group.size(), rows=rows)
