"""Online DPO (Guo et al. 2024): preference losses on the policy's own answers, the best against the worst of a prompt.

refit -> generate groups -> score -> a pair of each group -> logprobs by the reference -> losses of the pairs, as in dpo
"""

from __future__ import annotations

from dataclasses import replace

from aligner.config.rule import rules
from aligner.config.stage import Stage
from aligner.config.stages import dpo

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    from aligner.algorithms.first_step import FirstStepChecks
    from aligner.builders.job import Job
    from aligner.builders.models import make_preference_models, make_reward_model
    from aligner.builders.rollouts import find_prompts, make_rollouts
    from aligner.builders.runs import finish, make_run, saved_first
    from aligner.config.derived import response_limit
    from aligner.config.schema import Config
    from aligner.roles.policy import Policy, Reference
    from aligner.rollout.finish import finish_rollout
    from aligner.rollout.loss_inputs import set_token_rewards
    from aligner.rollout.pairs import best_and_worst, share_of_pairs
    from aligner.rollout.source import Rollouts
    from aligner.rollout.statistics import rollout_metrics
    from aligner.run.loop import Run
    from aligner.stages.dpo import learn


RULES = (
    *dpo.RULES,
    *rules("""
=> algorithm.preference.reference =model|adapter|none
    | for stage online_dpo, whose answers are not there before training
=> algorithm.preference.row_weights =false | for stage online_dpo: samples have no such column
=> batch.group >=2 | for stage online_dpo: a pair is of two of them
=> batch.minibatch_samples =0 | for stage online_dpo: one optimizer step, on all pairs of a rollout
=> batch.epochs =1 | for stage online_dpo: one optimizer step, on all pairs of a rollout
=> reward.normalize =false | for stage online_dpo, which compares answers to one prompt
=> debug.rollout_only =false | for stage online_dpo: stage sample writes answers
"""),
)

STAGE = Stage(
    reads=("preference",),
    rollouts=True,
    pairs=True,
    unit="pairs",
    rows=dpo.rows,
    other_models=dpo.other_models,
    debug=("first_step_checks",),
    rules=RULES,
)


def main(job: Job) -> None:
    cfg, prompts = job.cfg, find_prompts(job)
    reward_model = make_reward_model(job)
    policy, reference, models = make_preference_models(job)
    rollouts, state, evaluation = make_rollouts(job, policy, reward_model, prompts)
    run = make_run(job, models, state, evaluation)
    with saved_first(run):
        online_dpo(run, rollouts, policy, reference, cfg)
    finish(job, run, policy.model)


def online_dpo(run: Run, rollouts: Rollouts, policy: Policy, reference: Reference | None, cfg: Config) -> None:
    group = policy.model.layout.pgs.dp
    preference, limit = cfg.algorithm.preference, response_limit(cfg)
    # the losses are at temperature 1, as in dpo, whatever the pairs were sampled at
    policy, reference = replace(policy, temperature=1.0), reference and replace(reference, temperature=1.0)
    checks = FirstStepChecks(cfg.debug.first_step_checks and preference.reference != "none")
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)
        set_token_rewards(rollout, cfg.algorithm, 0.0, limit)
        metrics |= rollout_metrics(rollout, scores, cfg.algorithm, group)
        batch = best_and_worst(rollout, cfg.batch.group)
        metrics |= learn(run, step, batch, policy, reference, preference, checks) | share_of_pairs(batch, group)
        finish_rollout(run, step, metrics, rollout, scores, cfg, group)
