"""PPO (Schulman et al. 2017; Ouyang et al. 2022): a critic, generalised advantages, KL to the reference in the reward.

refit -> generate -> score -> logprobs, values -> GAE, whitening -> epochs x minibatches of policy and critic updates
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, islice

from aligner.config.rule import rules
from aligner.config.stage import Stage

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    import torch.distributed as dist
    from torch import Tensor

    from aligner.algorithms.advantages import critic_advantages
    from aligner.algorithms.first_step import FirstStepChecks
    from aligner.algorithms.losses import policy_loss
    from aligner.builders.job import Job
    from aligner.builders.models import make_critic, make_policy, make_reference, make_reward_model, optimizer_steps
    from aligner.builders.rollouts import find_prompts, make_rollouts
    from aligner.builders.runs import finish, make_run, saved_first
    from aligner.config.derived import response_limit
    from aligner.config.schema import Config
    from aligner.ops.rl.aggregate import aggregate, denominator
    from aligner.ops.rl.value_loss import clipped_value_loss
    from aligner.ops.seeds import derive
    from aligner.roles.critic import Critic
    from aligner.roles.policy import Policy, Reference
    from aligner.rollout.balance import Balancer
    from aligner.rollout.finish import finish_rollout
    from aligner.rollout.loss_inputs import KLController, average, minibatches, set_token_rewards
    from aligner.rollout.source import Rollouts
    from aligner.rollout.statistics import rollout_metrics, value_metrics
    from aligner.run.loop import Run
    from aligner.run.mismatch import check_mismatch, correct_mismatch
    from aligner.types import LossOutput, RolloutBatch, ScalarMetrics, TrainBatch, ValueTargets


def other_models(cfg: Config) -> tuple[str, ...]:
    return ("reference", "critic") if cfg.algorithm.kl.coef > 0 else ("critic",)


RULES = rules("""
=> algorithm.advantage =gae | for stage ppo, which has a critic
!critic.trunk=policy !critic.init !reward.model => critic.init
    | a folder to start the critic from, or reward.model for stage ppo
!model.lora.rank => critic.trunk =own
    | with model.lora.rank=0, which trains the policy's weights: nothing stays for a critic to share
critic.trunk=policy => critic.init =
    | with critic.trunk=policy: the critic starts from the policy's frozen weights
""")

STAGE = Stage(
    reads=("policy", "critic"),
    rollouts=True,
    other_models=other_models,
    debug=("first_step_checks",),
    rules=RULES,
)


def main(job: Job) -> None:
    cfg, prompts = job.cfg, find_prompts(job)
    reward_model, steps = make_reward_model(job), optimizer_steps(job)
    warmup = steps // cfg.run.steps * cfg.critic.warmup_steps if cfg.run.steps else 0
    policy = make_policy(job, steps - warmup)
    reference = make_reference(job, policy) if cfg.algorithm.kl.coef else None
    critic = make_critic(job, steps + cfg.critic.pretrain_steps, policy)
    rollouts, state, evaluation = make_rollouts(job, policy, reward_model, prompts)
    kl = KLController(cfg.algorithm.kl)
    run = make_run(job, {"policy": policy.model, "critic": critic.model}, state | {"kl": kl}, evaluation)
    with saved_first(run):
        ppo(run, rollouts, policy, critic, reference, kl, cfg)
    finish(job, run, policy.model)


def ppo(
    run: Run,
    rollouts: Rollouts,
    policy: Policy,
    critic: Critic,
    reference: Reference | None,
    kl: KLController,
    cfg: Config,
) -> None:
    group, samples = policy.model.layout.pgs.dp, cfg.batch.prompts * cfg.batch.group
    limit = response_limit(cfg)
    checks = FirstStepChecks(cfg.debug.first_step_checks)
    balancer = Balancer(policy.model.cfg, group, cfg.batch.balance)
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)

        with run.timers("logprobs"):
            rollout.old_logprobs = policy.logprobs(rollout, rollout.response_mask)
            if reference:
                rollout.ref_logprobs = reference.logprobs(rollout, rollout.response_mask)
            rollout.values = critic.values(rollout, rollout.response_mask)

        with run.timers("advantages"):
            correct_mismatch(rollout, cfg.mismatch)
            set_token_rewards(rollout, cfg.algorithm, kl.coef, limit)
        if step == 1 and cfg.critic.pretrain_steps:
            metrics |= pretrain(run, rollout, critic, cfg, balancer)
        with run.timers("advantages"):
            rollout.advantages, rollout.returns = critic_advantages(rollout, cfg.algorithm, group)
            metrics |= rollout_metrics(rollout, scores, cfg.algorithm, group) | value_metrics(rollout, group)
            check_mismatch(metrics, rollout, cfg.mismatch, policy.first_layer)
            checks.before_update(rollout, policy, reference)

        policy_stats, critic_stats = [], []
        learn_policy = step > cfg.critic.warmup_steps
        for epoch in range(cfg.batch.epochs):
            for minibatch in minibatches(rollout, cfg.batch, derive(cfg.seed, step), epoch, balancer):
                with run.timers("update"):
                    squared = value_loss(minibatch, cfg.critic.clip, group, cfg.algorithm.aggregation, limit)
                    critic_stats.append(critic.update(minibatch, squared))
                    if learn_policy:
                        loss = policy_loss(minibatch, cfg.algorithm, kl.coef, limit, group, dtype=policy.model.dtype)
                        policy_stats.append(policy.update(minibatch, loss))
                        checks.after_update(policy_stats[-1], policy.model.dtype)

        metrics |= average(policy_stats) | average(critic_stats) | balancer.metrics() | {"kl/coef": kl.coef}
        if reference:
            kl.update(metrics[kl.metric], samples)
        finish_rollout(run, step, metrics, rollout, scores, cfg, group)


def pretrain(run: Run, rollout: RolloutBatch, critic: Critic, cfg: Config, balancer: Balancer) -> ScalarMetrics:
    """Fit the critic to the returns with lambda 1 of one rollout, `critic.pretrain_steps` times, then recompute its
    `values`. An untrained critic would mislead the policy's first steps: VAPO, arXiv:2504.05118."""
    group, stats = critic.model.layout.pgs.dp, []
    _, rollout.returns = critic_advantages(rollout, replace(cfg.algorithm, lam=1.0), group)
    before = value_metrics(rollout, group)
    deal = partial(minibatches, rollout, cfg.batch, derive(cfg.seed, "pretrain"), balancer=balancer)
    for minibatch in islice((m for epoch in count() for m in deal(epoch)), cfg.critic.pretrain_steps):
        with run.timers("update"):
            squared = value_loss(minibatch, 0.0, group, cfg.algorithm.aggregation, response_limit(cfg))
            stats.append(critic.update(minibatch, squared))
    with run.timers("logprobs"):
        rollout.values = critic.values(rollout, rollout.response_mask)
    variance = "critic/explained_variance"
    return {
        "critic/pretrain_loss": stats[-1]["critic/loss"],
        "critic/pretrain_explained_variance_before": before[variance],
        "critic/pretrain_explained_variance": value_metrics(rollout, group)[variance],
    }


def value_loss(
    minibatch: TrainBatch, clip: float, group: dist.ProcessGroup, kind: str = "token_mean", response_limit: int = 0
) -> Callable[[Tensor, TrainBatch], LossOutput]:
    """Return the clipped squared error of the returns, aggregated (`kind`) over the whole minibatch."""
    total = denominator(minibatch.loss_mask, kind, response_limit, group)

    def loss(values: Tensor, batch: TrainBatch) -> LossOutput:
        targets = batch.of(ValueTargets)
        term = clipped_value_loss(values, targets.values, targets.returns, clip)
        value = aggregate(term.per_token, batch.loss_mask, kind, total)
        clipped = (term.clipped * batch.loss_mask).sum(), batch.loss_mask.sum()
        return LossOutput(value, {"critic/clip_fraction": clipped})

    return loss
