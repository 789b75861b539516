"""Rollouts without training (`debug.rollout_only`), for stages grpo and ppo: no optimizer, no update.

refit -> generate -> score -> logprobs -> metrics, samples, recordings
"""

from __future__ import annotations

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    from aligner.builders.job import Job
    from aligner.builders.models import make_policy, make_reward_model
    from aligner.builders.rollouts import find_prompts, make_rollouts
    from aligner.builders.runs import make_run, refuse_checkpoints
    from aligner.config.derived import response_limit
    from aligner.config.schema import Config
    from aligner.roles.policy import Policy
    from aligner.rollout.finish import finish_rollout
    from aligner.rollout.loss_inputs import set_token_rewards
    from aligner.rollout.source import Rollouts
    from aligner.rollout.statistics import rollout_metrics
    from aligner.run.loop import Run
    from aligner.run.mismatch import check_mismatch, correct_mismatch


def main(job: Job) -> None:
    """Run rollouts without saving, resuming or exporting: a second start begins with the first rollout."""
    refuse_checkpoints(job)
    prompts = find_prompts(job)
    policy = make_policy(job, 0)
    rollouts, _, evaluation = make_rollouts(job, policy, make_reward_model(job), prompts)
    run = make_run(job, {}, {}, evaluation)
    rollout_only(run, rollouts, policy, job.cfg)
    run.logger.close()


def rollout_only(run: Run, rollouts: Rollouts, policy: Policy, cfg: Config) -> None:
    group = policy.model.layout.pgs.dp
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)
        with run.timers("logprobs"):
            rollout.old_logprobs = policy.logprobs(rollout, rollout.response_mask)
        correct_mismatch(rollout, cfg.mismatch)
        set_token_rewards(rollout, cfg.algorithm, 0.0, response_limit(cfg))
        metrics |= rollout_metrics(rollout, scores, cfg.algorithm, group)
        check_mismatch(metrics, rollout, cfg.mismatch, policy.first_layer)
        finish_rollout(run, step, metrics, rollout, scores, cfg, group)
