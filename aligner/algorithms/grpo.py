"""GRPO and its relatives (Shao et al. 2024): advantages from the other samples of the same prompt, no critic.

refit -> generate groups -> score -> logprobs -> group advantages -> epochs x minibatches of policy updates
"""

from __future__ import annotations

from aligner.algorithms.losses import policy_loss
from aligner.config.schema import Config
from aligner.ops import advantages
from aligner.ops.seeds import derive
from aligner.roles.policy import Policy, Reference
from aligner.rollout.prepare import (
    KLController,
    average,
    minibatches,
    sample_rows,
    set_token_rewards,
    shuffle_within_groups,
    total_tokens,
)
from aligner.rollout.source import RolloutSource
from aligner.rollout.statistics import rollout_metrics
from aligner.run.loop import Run
from aligner.run.mismatch import check_mismatch

ESTIMATORS = {"grpo": advantages.grpo, "dr_grpo": advantages.dr_grpo, "rloo": advantages.rloo}


def grpo(
    run: Run, rollouts: RolloutSource, policy: Policy, reference: Reference | None, kl: KLController, cfg: Config
) -> None:
    group, samples = policy.model.layout.pgs.dp, cfg.batch.prompts * cfg.batch.group
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)
        if cfg.debug.shuffle_rewards:
            shuffle_within_groups(rollout, derive(cfg.seed, step))

        with run.timers("logprobs"):
            rollout.old_logprobs = policy.logprobs(rollout)
            if reference:
                rollout.ref_logprobs = reference.logprobs(rollout)

        with run.timers("advantages"):
            set_token_rewards(rollout, cfg.algorithm, kl.coef)
            outcome = rollout.token_rewards.sum(1)
            advantage = ESTIMATORS[cfg.algorithm.advantage](outcome, rollout.group, rollout.valid)
            rollout.advantages = advantages.broadcast(advantage, rollout.response_mask)
            if cfg.algorithm.whiten:
                rollout.advantages = advantages.whiten(rollout.advantages, rollout.loss_mask, group)
            metrics |= rollout_metrics(rollout, scores, group)
            check_mismatch(metrics, rollout, cfg.mismatch)

        stats = []
        for epoch in range(cfg.batch.epochs):
            for minibatch in minibatches(rollout, cfg.batch, derive(cfg.seed, step), epoch):
                loss = policy_loss(minibatch, cfg.algorithm, kl.coef, cfg.sampling.max_response_tokens, group)
                with run.timers("update"):
                    stats.append(policy.update(minibatch, loss))

        metrics |= average(stats) | {"kl/coef": kl.coef}
        if reference:
            kl.update(metrics["kl/ref_k1"], samples)
        shown = sample_rows(rollout, cfg.logging.samples_shown)
        run.finish(step, metrics, shown, total_tokens(rollout, group), samples)
