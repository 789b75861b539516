"""Reward model: a scalar head that ranks the chosen answer of a pair above the rejected one (or predicts attributes).

pairs of the step -> scores at the last tokens -> Bradley-Terry loss -> optimizer step; at the end: mean score -> bias
"""

from __future__ import annotations

from aligner.algorithms.first_step import FirstStepChecks, zero_head_loss
from aligner.algorithms.losses import attribute_loss, preference_loss
from aligner.config.algorithm import AlgorithmConfig
from aligner.data.batches import BatchSource
from aligner.roles.reward_model import RewardModel
from aligner.run.loop import Run


def rm(run: Run, model: RewardModel, batches: BatchSource, cfg: AlgorithmConfig, checks: FirstStepChecks) -> None:
    group = model.model.layout.pgs.dp
    pairwise = cfg.reward_loss.kind == "bradley_terry"
    unit = 2 if pairwise else 1
    for step in run.steps():
        batch = batches.next()
        count = len(batch.lengths) // unit
        loss = preference_loss(count, cfg, group) if pairwise else attribute_loss(count, group)
        with run.timers("update"):
            stats = model.update(batch, loss, unit)
        if pairwise:
            checks.after_reward_update(stats, zero_head_loss(batch, cfg.reward_loss.margin, group))
        rows = len(batch.lengths) * group.size()
        run.finish(step, stats | batches.metrics(), tokens=float(batch.lengths.sum()) * group.size(), rows=rows)
