"""The end of a step on a rollout."""

from __future__ import annotations

import torch.distributed as dist

from aligner.config.schema import Config
from aligner.rewards.composite import Scores
from aligner.rollout.loss_inputs import sample_rows, total_tokens
from aligner.run.loop import Run
from aligner.types import RolloutBatch, ScalarMetrics


def finish_rollout(
    run: Run,
    step: int,
    metrics: ScalarMetrics,
    rollout: RolloutBatch,
    scores: Scores,
    cfg: Config,
    group: dist.ProcessGroup,
) -> None:
    """Close a step (`Run.finish`), with samples of its rollout to show. `group`: the data-parallel ranks."""
    shown = sample_rows(rollout, scores, cfg.logging.samples_shown)
    run.finish(step, metrics, shown, total_tokens(rollout, group), cfg.batch.prompts * cfg.batch.group)
