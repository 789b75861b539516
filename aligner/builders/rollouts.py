"""From a job to its source of rollouts: an engine's, stored and recorded where that is asked for, or recordings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from aligner.builders.data import make_prompts, make_sampling, make_stream, make_training_set, settle_steps
from aligner.builders.engines import make_evaluator, make_refit, make_verifier
from aligner.builders.environments import find_tools, make_turns
from aligner.builders.job import Job, digest, tokenizer_hash
from aligner.builders.rewards import make_rewards
from aligner.config.freeze import rollout_key
from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.errors import ConfigError
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.megatron.train import ShardedModel
from aligner.models.fingerprint import file_fingerprint
from aligner.ops.agree import by_rank_0, same_view
from aligner.refit.transfer import Refit
from aligner.roles.model_init import shape_of
from aligner.roles.policy import Policy
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel
from aligner.rollout.evaluate import Evaluator
from aligner.rollout.own import OwnAnswers
from aligner.rollout.player import Player
from aligner.rollout.record import FOLDER, Origin, Recorder
from aligner.rollout.references import check_rows
from aligner.rollout.replay import RecordedSource, Replayed, check_recording
from aligner.rollout.requests import Requests
from aligner.rollout.schedule import Schedule
from aligner.rollout.score import Scorer
from aligner.rollout.sharing import share
from aligner.rollout.source import Rollouts, RolloutSource, Weights
from aligner.rollout.store import FOLDER as PENDING
from aligner.rollout.store import Store
from aligner.run.checkpoints import Stateful
from aligner.run.rows import file_name


def find_prompts(job: Job) -> PromptDataset | PromptMixture | None:
    """What is answered; None where recordings are. Settles run.steps."""
    cfg = job.cfg
    if cfg.debug.train_only:
        if cfg.run.epochs:
            expected = "0 with debug.train_only: recordings have steps, not rows"
            raise ConfigError("run.epochs", cfg.run.epochs, expected)
        return None
    if cfg.environment.on:
        find_tools(job)
    prompts = make_training_set(job, partial(make_prompts, job))
    settle_steps(job, prompts, "prompts")
    return prompts


def make_rollouts(
    job: Job,
    policy: Policy,
    reward_model: RewardModel | ProcessRewardModel | None,
    prompts: PromptDataset | PromptMixture | None,
) -> tuple[Rollouts, dict[str, Stateful], Evaluator | None]:
    """The source of rollouts, those of its parts that a checkpoint keeps, and what evaluates between them."""
    cfg = job.cfg
    if prompts is None:
        model = policy.model
        where = cfg.debug.train_only, cfg.run.steps, _origin(job), job.layout
        routed = model.cfg if cfg.mismatch.replay_routing else None
        source = RecordedSource.open(*where, lambda: model.step_count, job.say, routed)
        seen = same_view(cfg.debug.train_only, lambda: {p.name: file_fingerprint(p) for p in source.files.values()})
        source.timers = job.timers
        job.contents["debug.train_only"] = seen[source.files[1].name]
        return _recorded(job, source), {}, None
    rewards = make_rewards(job, reward_model)
    check_rows(rewards, prompts, len(prompts), job.say)
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    refit = make_refit(job, policy.model)
    verifier = make_verifier(job, refit, policy, prompts)
    stream, layout, count = make_stream(job, prompts, cfg.batch.prompts), job.layout, cfg.batch.prompts
    mine = range(count)[share(count, layout.data, layout.dp_rank)]
    sampling = make_sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens)
    if cfg.environment.on:
        player = make_turns(job, refit.engine, sampling)
    else:
        player = Player(refit.engine, job.tokenizer, sampling, layout.peers, job.timers, cfg.engine.window)
    requests = Requests(prompts, stream, cfg.batch.group, count, mine, cfg.seed)
    schedule = _schedule(job, requests, player, policy.model)
    scorer = Scorer(rewards, layout.peers, job.timers)
    weights = Weights(refit, verifier, job.timers)
    source: Rollouts = RolloutSource(weights, requests, schedule, scorer, cfg.algorithm, layout.pgs.dp)
    state = {"data": stream, "rewards": rewards, "sentinel": verifier, "clock": schedule}
    source = _replayed(job, source, policy.model) if cfg.debug.replay else source
    return _recorded(job, source), state, make_evaluator(job, refit, reward_model, player)


def _replayed(job: Job, source: Rollouts, model: ShardedModel) -> Replayed:
    """Of the recorded rollouts those without a gap behind them: none may be asked of the source after one. Raises
    DataError."""
    folder, files = Path(job.cfg.debug.replay) / FOLDER, {}
    routed = model.cfg if job.cfg.mismatch.replay_routing else None
    for step in range(job.cfg.debug.until or job.cfg.run.steps, 0, -1):
        path = folder / file_name(step)
        if not path.is_file():
            break
        check_recording(path, _origin(job), routed)
        files[step] = path
    recorded = RecordedSource(files, job.layout, job.cfg.batch.prompts, lambda: model.step_count, routed, job.timers)
    return Replayed(source, recorded)


def _recorded(job: Job, source: Rollouts) -> Recorder:
    cfg, folder = job.cfg, Path(job.cfg.run.dir) / FOLDER
    count = cfg.debug.record or (cfg.run.steps if cfg.debug.rollout_only else 0)
    recorder = Recorder(source, job.seen, folder, count, _origin(job), job.layout, job.tokenizer.pad_token_id)
    job.on_step.append(recorder.keep)
    return recorder


def make_own_answers(
    job: Job, policy: Policy, refit: Refit, prompts: PromptDataset | PromptMixture, count: int
) -> tuple[OwnAnswers, dict[str, Stateful]]:
    """Of the policy, to `count` rows of the training set at a time, and what of it a checkpoint keeps."""
    cfg, layout = job.cfg, job.layout
    verifier, stream = make_verifier(job, refit, policy, prompts), make_stream(job, prompts, count)
    sampling = make_sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens)
    mine = range(count)[share(count, layout.data, layout.dp_rank)]
    answers = OwnAnswers(
        Weights(refit, verifier, job.timers),
        Requests(prompts, stream, 1, count, mine, cfg.seed),
        Player(refit.engine, job.tokenizer, sampling, layout.peers, job.timers),
        layout.pgs.dp,
        cfg.algorithm.distill.told_by,
    )
    return answers, {"prompts": stream, "sentinel": verifier}


def _schedule(job: Job, requests: Requests, player: Player, model: ShardedModel) -> Schedule:
    """What a checkpoint needs of it is there, and what none needs is deleted."""
    cfg = job.cfg
    everyone = replace(requests, mine=range(requests.slots)) if cfg.engine.window else requests
    when = cfg.engine.lag, cfg.engine.window, cfg.run.steps
    version = lambda: model.step_count  # noqa: E731
    schedule = Schedule(*when, everyone, requests.mine, player, version, job.layout.pgs.dp, _store(job))

    def forget(step: int) -> None:
        folder = Path(cfg.run.dir) / "checkpoints"
        schedule.forget(step, [number for number, _ in complete_checkpoints(folder)])

    job.on_save.append(schedule.secure)
    job.on_commit.append(forget)
    if not cfg.checkpoint.every:  # none is on its way before the end: all that was stored would stay until then
        schedule.passed = forget
    return schedule


def _store(job: Job) -> Store | None:
    """Where rollouts are stored until checkpoints make them useless, if any may need them; empty where this start
    continues nothing."""
    cfg = job.cfg
    # config.yaml has the model's true shape, the config that a run began with may have a default one
    key, other = (
        digest((rollout_key(each), sorted(job.contents.items()), job.initial.content))
        for each in (replace(cfg, model=job.initial.config), cfg)
    )
    store = Store(Path(cfg.run.dir) / PENDING, key, job.layout, cfg.engine.window > 0, other)
    if cfg.run.resume != "auto":
        store.clear()
    elif others := by_rank_0(store.others):
        job.say(f"{store.folder}: ignored {len(others)} that are no rollout, as {others[0]!r:.80}")
    needed = cfg.engine.lag or (cfg.checkpoint.rollouts and cfg.checkpoint.every)
    return store if needed and not cfg.debug.rollout_only else None


def _origin(job: Job) -> Origin:
    cfg, shape = job.cfg, job.initial.config
    return Origin(
        tokenizer_hash(job),
        shape.vocab_size,
        cfg.batch.prompts,
        cfg.batch.group,
        cfg.sampling.temperature,
        digest(sorted(shape_of(shape).items())),
        cfg.stage.name,
    )
