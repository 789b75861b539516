"""GRPO and its relatives (Shao et al. 2024): advantages from other samples of the same prompt, no critic.

refit -> generate groups -> score -> logprobs -> group advantages -> epochs x minibatches of policy updates
"""

from __future__ import annotations

from aligner.config.rule import rules
from aligner.config.stage import Stage

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    import torch

    from aligner.algorithms.advantages import group_advantages
    from aligner.algorithms.anchor import Anchor
    from aligner.algorithms.first_step import FirstStepChecks
    from aligner.algorithms.losses import policy_loss
    from aligner.builders.job import Job
    from aligner.builders.models import make_policy, make_reference, make_reward_model, optimizer_steps
    from aligner.builders.rollouts import find_prompts, make_rollouts
    from aligner.builders.runs import finish, make_run, saved_first
    from aligner.config.derived import old_logprobs_in_update, response_limit
    from aligner.config.schema import Config
    from aligner.ops.rl.mismatch import finish_mismatch
    from aligner.ops.seeds import derive
    from aligner.roles.policy import Policy, Reference
    from aligner.rollout.balance import Balancer
    from aligner.rollout.finish import finish_rollout
    from aligner.rollout.loss_inputs import (
        KLController,
        average,
        minibatches,
        set_token_rewards,
        shuffle_within_groups,
    )
    from aligner.rollout.source import Rollouts
    from aligner.rollout.statistics import rollout_metrics
    from aligner.run.loop import Run
    from aligner.run.mismatch import check_mismatch, correct_mismatch


def other_models(cfg: Config) -> tuple[str, ...]:
    return ("reference",) if cfg.algorithm.kl.coef > 0 else ()


RULES = rules("=> algorithm.advantage !=gae | , which is for stage ppo")

STAGE = Stage(
    reads=("policy",),
    rollouts=True,
    other_models=other_models,
    debug=("shuffle_rewards", "first_step_checks"),
    rules=RULES,
)


def main(job: Job) -> None:
    cfg, prompts = job.cfg, find_prompts(job)
    reward_model = make_reward_model(job)
    policy = make_policy(job, optimizer_steps(job))
    reference = make_reference(job, policy) if cfg.algorithm.kl.coef else None
    rollouts, state, evaluation = make_rollouts(job, policy, reward_model, prompts)
    kl = KLController(cfg.algorithm.kl)
    run = make_run(job, {"policy": policy.model}, state | {"kl": kl}, evaluation)
    with saved_first(run):
        grpo(run, rollouts, policy, reference, kl, cfg)
    finish(job, run, policy.model)


def grpo(
    run: Run, rollouts: Rollouts, policy: Policy, reference: Reference | None, kl: KLController, cfg: Config
) -> None:
    group, samples = policy.model.layout.pgs.dp, cfg.batch.prompts * cfg.batch.group
    limit = response_limit(cfg)
    checks = FirstStepChecks(cfg.debug.first_step_checks)
    balancer = Balancer(policy.model.cfg, group, cfg.batch.balance)
    find_old = not old_logprobs_in_update(cfg)
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)
        if cfg.debug.shuffle_rewards:
            shuffle_within_groups(rollout, scores, derive(cfg.seed, step))

        with run.timers("logprobs"):
            if find_old:
                rollout.old_logprobs = policy.logprobs(rollout, rollout.response_mask)
            if reference:
                rollout.ref_logprobs = reference.logprobs(rollout, rollout.response_mask)

        with run.timers("advantages"):
            correct_mismatch(rollout, cfg.mismatch)
            set_token_rewards(rollout, cfg.algorithm, kl.coef, limit)
            rollout.advantages = group_advantages(rollout, scores, cfg, group)
            metrics |= rollout_metrics(rollout, scores, cfg.algorithm, group)
            if find_old:
                check_mismatch(metrics, rollout, cfg.mismatch, policy.first_layer)
            checks.before_update(rollout, policy, reference)

        stats, before = [], policy.model.step_count
        if cfg.algorithm.old_logprobs == "proxy" and rollout.versions is None:
            rollout.versions = torch.full_like(rollout.tokens, rollout.weight_version)
        for epoch in range(cfg.batch.epochs):
            for minibatch in minibatches(rollout, cfg.batch, derive(cfg.seed, step), epoch, balancer):
                anchor = Anchor(cfg.algorithm.old_logprobs, cfg.mismatch, before, policy.model.step_count)
                loss = policy_loss(minibatch, cfg.algorithm, kl.coef, limit, group, anchor, policy.model.dtype)
                with run.timers("update"):
                    stats.append(policy.update(minibatch, loss))
                checks.after_update(stats[-1], policy.model.dtype)

        metrics |= finish_mismatch(average(stats)) | balancer.metrics() | {"kl/coef": kl.coef}
        if not find_old:
            check_mismatch(metrics, rollout, cfg.mismatch, policy.first_layer)
        if reference:
            kl.update(metrics[kl.metric], samples)
        finish_rollout(run, step, metrics, rollout, scores, cfg, group)
