"""GRPO as a stage in a file of your own (docs/how-to/own-stage.md): `stage=examples/own_stage.py`."""

from aligner import api

STAGE = api.Stage(
    reads=("policy",),
    rollouts=True,
    other_models=lambda cfg: ("reference",) if cfg.algorithm.kl.coef else (),
    rules=api.rules("=> algorithm.kl.controller.kind =fixed | for this stage"),
    defaults={"batch.group": 8, "algorithm.kl.estimator": "k3", "algorithm.kl.placement": "loss"},
)


def main(job):
    cfg, prompts = job.cfg, api.find_prompts(job)
    reward_model = api.make_reward_model(job)
    policy = api.make_policy(job, api.optimizer_steps(job))
    reference = api.make_reference(job, policy) if cfg.algorithm.kl.coef else None
    rollouts, state, evaluation = api.make_rollouts(job, policy, reward_model, prompts)
    run = api.make_run(job, {"policy": policy.model}, state, evaluation)
    with api.saved_first(run):
        grpo(run, rollouts, policy, reference, cfg)
    api.finish(job, run, policy.model)


def grpo(run, rollouts, policy, reference, cfg):
    group, limit, beta = policy.model.layout.pgs.dp, api.response_limit(cfg), cfg.algorithm.kl.coef
    balancer = api.Balancer(policy.model.cfg, group, cfg.batch.balance)
    for step in run.steps():
        rollout, metrics, scores = rollouts.next(step)
        rollout.old_logprobs = policy.logprobs(rollout, rollout.response_mask)
        if reference:
            rollout.ref_logprobs = reference.logprobs(rollout, rollout.response_mask)
        api.correct_mismatch(rollout, cfg.mismatch)
        api.set_token_rewards(rollout, cfg.algorithm, beta, limit)
        rollout.advantages = api.group_advantages(rollout, scores, cfg, group)
        metrics |= api.rollout_metrics(rollout, scores, cfg.algorithm, group)
        stats = []
        for epoch in range(cfg.batch.epochs):
            for minibatch in api.minibatches(rollout, cfg.batch, api.derive(cfg.seed, step), epoch, balancer):
                loss = api.policy_loss(minibatch, cfg.algorithm, beta, limit, group, dtype=policy.model.dtype)
                stats.append(policy.update(minibatch, loss))
        metrics |= api.average(stats) | balancer.metrics()
        api.finish_rollout(run, step, metrics, rollout, scores, cfg, group)
