"""Online DPO (Guo et al. 2024): preference losses on the policy's own answers, the best against the worst of a prompt.

refit -> generate groups -> score -> a pair of each group -> logprobs by the reference -> losses of the pairs, as in dpo
"""

from __future__ import annotations

from dataclasses import replace

from aligner.algorithms.first_step import FirstStepChecks
from aligner.builders.job import Job
from aligner.builders.models import make_policy, make_reference, make_reward_model
from aligner.builders.rollouts import make_rollouts
from aligner.builders.runs import finish, make_run, saved_first
from aligner.config.schema import Config
from aligner.ops.rl.by_rank import with_partners
from aligner.roles.policy import Policy, Reference
from aligner.rollout.loss_inputs import sample_rows, set_token_rewards, total_tokens
from aligner.rollout.pairs import best_and_worst, share_of_pairs
from aligner.rollout.source import Rollouts
from aligner.rollout.statistics import rollout_metrics
from aligner.run.loop import Run
from aligner.stages.dpo import dpo_loss, losses_at_start


def main(job: Job) -> None:
    cfg, preference, reward_model = job.cfg, job.cfg.algorithm.preference, make_reward_model(job)
    policy = make_policy(job, cfg.run.steps, entropy=False, log_squares=preference.wpo)
    reference = None
    if preference.reference in ("model", "adapter"):
        reference = make_reference(job, policy if preference.reference == "adapter" else None)
    rollouts, state, evaluation = make_rollouts(job, policy, reward_model)
    models = {"policy": policy.model}
    if reference is not None and preference.sync_every:
        models["reference"] = reference.model
    run = make_run(job, models, state, evaluation)
    with saved_first(run):
        online_dpo(run, rollouts, policy, reference, cfg)
    finish(job, run, policy.model)


def online_dpo(run: Run, rollouts: Rollouts, policy: Policy, reference: Reference | None, cfg: Config) -> None:
    group, samples = policy.model.layout.pgs.dp, cfg.batch.prompts * cfg.batch.group
    preference, limit = cfg.algorithm.preference, cfg.sampling.max_response_tokens
    # pairs do not ask how they came about: the losses are of the models themselves, as in dpo
    policy, reference = replace(policy, temperature=1.0), reference and replace(reference, temperature=1.0)
    checks = FirstStepChecks(cfg.debug.first_step_checks and preference.reference != "none")
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)
        set_token_rewards(rollout, cfg.algorithm, 0.0, limit)
        metrics |= rollout_metrics(rollout, scores, cfg.algorithm, group)
        batch, fresh = best_and_worst(rollout, cfg.batch.group), policy.model.step_count == 0
        if reference:
            with run.timers("logprobs"):
                if preference.sync_every and step > 1 and (step - 1) % preference.sync_every == 0:
                    reference.follow(policy, preference.sync_alpha)
                batch.ref_logprobs = reference.logprobs(batch, batch.loss_mask, unit=2)
        if preference.by_rank:
            with run.timers("logprobs"):
                logprobs = policy.logprobs(batch, batch.loss_mask, unit=2)
                batch.labels = with_partners(batch, logprobs, preference, group)
        with run.timers("update"):
            stats = policy.update(batch, dpo_loss(batch, preference, group), unit=2)
        if fresh:
            checks.after_preference_update(stats, losses_at_start(batch, preference, group), policy.model.dtype)
        metrics |= stats | {"dpo/loss": stats["policy/loss"]} | share_of_pairs(batch, group)
        shown = sample_rows(rollout, scores, cfg.logging.samples_shown)
        run.finish(step, metrics, shown, total_tokens(rollout, group), samples)
