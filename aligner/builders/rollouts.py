"""Source of rollouts, from a job: an engine's, stored and recorded if configured, or recordings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from aligner.builders.data import make_prompts, make_sampling, make_stream, make_training_set, settle_steps
from aligner.builders.engines import make_evaluator, make_refit, make_suite, make_verifier
from aligner.builders.job import Job, digest
from aligner.builders.rewards import make_rewards
from aligner.builders.runs import together
from aligner.config.derived import counts_outcomes, recorded_steps
from aligner.config.freeze import rollout_key
from aligner.config.on_demand import on_demand
from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.errors import ConfigError
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.megatron.train import ShardedModel
from aligner.ops.agree import by_rank_0
from aligner.roles.policy import Policy
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel
from aligner.rollout.references import check_rows
from aligner.rollout.requests import Requests
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.schedule import Schedule
from aligner.rollout.score import Scorer
from aligner.rollout.sharing import share
from aligner.rollout.source import HashedRollouts, Rollouts, RolloutSource, Weights
from aligner.rollout.store import FOLDER, Store
from aligner.run.checkpoints import Stateful
from aligner.run.loop import Evaluate


def find_prompts(job: Job) -> PromptDataset | PromptMixture | None:
    """Make the prompts; None if recordings are used. Settles run.steps."""
    cfg = job.cfg
    if cfg.debug.train_only:
        if cfg.run.epochs:
            expected = "0 with debug.train_only: recordings have steps, not rows"
            raise ConfigError("run.epochs", cfg.run.epochs, expected)
        return None
    prompts = make_training_set(job, partial(make_prompts, job, curriculum=cfg.curriculum))
    settle_steps(job, prompts, "prompts")
    return prompts


def make_rollouts(
    job: Job,
    policy: Policy,
    reward_model: RewardModel | ProcessRewardModel | None,
    prompts: PromptDataset | PromptMixture | None,
) -> tuple[Rollouts, dict[str, Stateful], Evaluate | None]:
    """Make the source of rollouts, its state for checkpoints, and the evaluator that runs between them."""
    cfg = job.cfg
    if prompts is None:
        return _watched(job, on_demand("debug.train_only")(job, policy.model)), {}, None
    rewards = make_rewards(job, reward_model)
    check_rows(rewards, prompts, len(prompts), job.say)
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    refit = make_refit(job, policy.model)
    verifier = make_verifier(job, refit, policy, prompts)
    layout, count = job.layout, cfg.batch.prompts
    stream = make_stream(job, prompts, count, curriculum=cfg.curriculum)
    own_slots = range(count)[share(count, layout.data, layout.dp_rank)]
    sampling = make_sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens)
    if cfg.model.invariant:
        policy.first_layer = partial(on_demand("mismatch.expect"), policy, refit.engine)
    if cfg.environment.on:
        generator = on_demand("environment, to generate")(job, refit.engine, sampling)
    else:
        generator = SampleGenerator(refit.engine, job.tokenizer, sampling, layout.peers, job.timers, cfg.engine.window)
    requests = Requests(prompts, stream, cfg.batch.group, count, own_slots, cfg.seed)
    schedule = _schedule(job, requests, generator, policy.model)
    scorer = Scorer(rewards, layout.peers, job.timers)
    weights = Weights(refit, verifier, job.timers)
    outcomes = None
    if counts_outcomes(cfg):
        of_stream = stream if cfg.curriculum.skip_epochs else None
        outcomes = on_demand("outcomes")(prompts, rewards, cfg.eval.full_score, layout.pgs.dp, of_stream)
    source: Rollouts = RolloutSource(weights, requests, schedule, scorer, cfg.algorithm, layout.pgs.dp, outcomes)
    state = {"data": stream, "rewards": rewards, "sentinel": verifier, "clock": schedule}
    if cfg.debug.replay:
        source = on_demand("debug.replay")(job, source, policy.model)
    evaluation = together(make_evaluator(job, refit, reward_model, generator), make_suite(job, refit))
    return _watched(job, source), state, evaluation


def _watched(job: Job, source: Rollouts) -> Rollouts:
    """Return the source, observed by the chain of hashes and by the recorder."""
    source = HashedRollouts(source, job.seen)
    return on_demand("debug.record")(job, source) if recorded_steps(job.cfg) else source


def _schedule(job: Job, requests: Requests, generator: SampleGenerator, model: ShardedModel) -> Schedule:
    """Make the schedule. Checkpoints secure the stored rollouts that they need, and those that none needs are
    deleted."""
    cfg = job.cfg
    everyone = replace(requests, own_slots=range(requests.slots)) if cfg.engine.window else requests
    when = cfg.engine.lag, cfg.engine.window, cfg.run.steps
    version = lambda: model.step_count  # noqa: E731
    schedule = Schedule(*when, everyone, requests.own_slots, generator, version, job.layout.pgs.dp, _store(job))

    def forget(step: int) -> None:
        folder = Path(cfg.run.dir) / "checkpoints"
        schedule.forget(step, [number for number, _ in complete_checkpoints(folder)])

    job.built.on_save.append(schedule.store_in_flight)
    job.built.on_commit.append(forget)
    if not cfg.checkpoint.every:  # there is no checkpoint before the end: everything stored would stay until then
        schedule.passed = forget
    return schedule


def _store(job: Job) -> Store | None:
    """Return the store of rollouts, if a checkpoint may need any. It is empty if this start resumes nothing."""
    cfg = job.cfg
    # config.yaml has the model's true shape, the config that a run began with may have a default one
    key, other = (
        digest((rollout_key(each), sorted(job.built.contents.items()), job.initial.content))
        for each in (replace(cfg, model=job.initial.config), cfg)
    )
    store = Store(Path(cfg.run.dir) / FOLDER, key, job.layout, cfg.engine.window > 0, other)
    if cfg.run.resume != "auto":
        store.clear()
    elif others := by_rank_0(store.others):
        job.say(f"{store.folder}: ignored {len(others)} that are no rollout, as {others[0]!r:.80}")
    needed = cfg.engine.lag or (cfg.checkpoint.rollouts and cfg.checkpoint.every)
    return store if needed and not cfg.debug.rollout_only else None
