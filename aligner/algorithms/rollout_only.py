"""Rollouts without training (`debug.rollout_only`), for stages grpo and ppo: no optimizer, no update.

refit -> generate -> score -> logprobs -> metrics, samples, recordings
"""

from __future__ import annotations

from aligner.config.schema import Config
from aligner.roles.policy import Policy
from aligner.rollout.prepare import sample_rows, set_token_rewards, total_tokens
from aligner.rollout.source import Rollouts
from aligner.rollout.statistics import rollout_metrics
from aligner.run.loop import Run
from aligner.run.mismatch import check_mismatch, correct_mismatch


def rollout_only(run: Run, rollouts: Rollouts, policy: Policy, cfg: Config) -> None:
    group, samples = policy.model.layout.pgs.dp, cfg.batch.prompts * cfg.batch.group
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)
        with run.timers("logprobs"):
            rollout.old_logprobs = policy.logprobs(rollout, rollout.response_mask)
        correct_mismatch(rollout, cfg.mismatch)
        set_token_rewards(rollout, cfg.algorithm, 0.0, cfg.sampling.max_response_tokens)
        metrics |= rollout_metrics(rollout, scores, cfg.algorithm, group)
        check_mismatch(metrics, rollout, cfg.mismatch)
        shown = sample_rows(rollout, scores, cfg.logging.samples_shown)
        run.finish(step, metrics, shown, total_tokens(rollout, group), samples)
