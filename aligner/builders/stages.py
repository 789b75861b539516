"""Each stage: its parts, its run, its recipe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aligner.algorithms.first_step import FirstStepChecks
from aligner.algorithms.grpo import grpo
from aligner.algorithms.ppo import ppo
from aligner.algorithms.rm import rm
from aligner.algorithms.rollout_only import rollout_only
from aligner.algorithms.sft import sft
from aligner.builders.engines import make_evaluator, make_refit, make_verifier
from aligner.builders.parts import (
    Job,
    make_batches,
    make_critic,
    make_model,
    make_policy,
    make_prompts,
    make_reference,
    make_reward_model,
    make_rewards,
    make_sampling,
    make_stream,
    optimizer_steps,
    rows_of,
)
from aligner.config.freeze import reward_code, rollout_key
from aligner.config.identity import definition
from aligner.config.schema import ROLLOUT_STAGES
from aligner.config.validate import evaluation_functions
from aligner.data.collate import collate_preference, collate_scored, collate_sft
from aligner.data.dataset import PreferenceDataset, ScoredDataset, SftDataset
from aligner.data.formats import preference_rows, scored_rows, sft_rows
from aligner.engines.native.remote import RemoteEngine
from aligner.errors import ConfigError, EngineError, MemoryLimitError, MismatchError, RewardError
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.megatron.model import Head
from aligner.megatron.offload import ModelMemory
from aligner.megatron.train import ShardedModel
from aligner.models.fingerprint import file_fingerprint
from aligner.models.safetensors_io import open_hf
from aligner.ops.agree import same_view
from aligner.refit.export import EXTRA_FILE, export_hf
from aligner.roles.initial import shape_of
from aligner.roles.policy import Policy
from aligner.roles.reward_model import RewardModel
from aligner.rollout.evaluate import Evaluator
from aligner.rollout.heldout import held_out_loss, pair_accuracy, score_statistics
from aligner.rollout.pending import FOLDER as PENDING
from aligner.rollout.pending import PendingRollouts
from aligner.rollout.prepare import KLController
from aligner.rollout.record import FOLDER, Origin, Recorder
from aligner.rollout.references import check_rows
from aligner.rollout.replay import RecordedSource
from aligner.rollout.source import Rollouts, RolloutSource
from aligner.run.alarms import Alarms
from aligner.run.checkpoints import Checkpoints
from aligner.run.loop import Evaluate, Run
from aligner.run.metrics import MetricsLogger
from aligner.run.phases import PhaseMemory


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _tokenizer_hash(job: Job) -> str:
    return _digest(sorted(job.tokenizer.get_vocab().items()))


def _identity(job: Job) -> dict[str, Any]:
    return {
        "stage": job.cfg.stage.name,
        "model": shape_of(job.initial.config),
        "tokenizer": _tokenizer_hash(job),
        "algorithm": {
            "advantage": job.cfg.algorithm.advantage if job.cfg.stage.name in ROLLOUT_STAGES else "",
            "reward_loss": job.cfg.algorithm.reward_loss.kind if job.cfg.stage.name == "rm" else "",
        },
    }


def _definition(job: Job) -> dict[str, Any]:
    """What this run is made of, the same on every rank. Raises ViewError."""
    cfg, tokenizer, code = job.cfg, job.tokenizer, reward_code(job.cfg)
    contents = {"model.init": job.initial.content}
    contents["model.tokenizer"] = _digest((tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.pad_token_id))
    if code:
        contents["reward.functions"] = hashlib.sha256(code).hexdigest()[:16]
    found = definition(cfg, contents | job.contents)
    mine = {key: json.dumps(value) for key, value in (found | _identity(job)).items()}
    same_view(cfg.run.dir, lambda: mine)
    return found


def _run(job: Job, models: dict[str, ShardedModel], state: dict[str, Any], evaluate: Evaluate | None) -> Run:
    cfg, run_dir = job.cfg, Path(job.cfg.run.dir)
    alarms = Alarms(cfg.sampling.max_response_tokens, cfg.critic.warmup_steps)
    checkpoints = Checkpoints(
        run_dir,
        cfg.checkpoint,
        models,
        state | {"alarms": alarms},
        _identity(job),
        _definition(job),
        cfg.run.accept_changes,
    )
    checkpoints.now = job.watchdog.clock.now
    logger = MetricsLogger(run_dir, cfg.logging, dataclasses.asdict(cfg), job.env.rank)
    run = Run(
        cfg.run,
        cfg.stage.name,
        job.env.rank,
        checkpoints,
        logger,
        alarms,
        evaluate,
        job.boundary,
        samples_shown=cfg.logging.samples_shown,
        progress=cfg.logging.progress,
        checkpoint_every=0 if cfg.debug.rollout_only else cfg.checkpoint.every,
        save_final=cfg.checkpoint.final and not cfg.debug.rollout_only,
        save_stopped=not cfg.debug.rollout_only,
    )
    run.accepted = job.start.accepted
    run.timers = job.timers
    run.timers.on_phase = job.watchdog.phase
    memories = {role: ModelMemory(model, cfg.memory.pin) for role, model in job.models.items()}
    here = None if isinstance(job.engine, RemoteEngine) else job.engine
    run.memory = PhaseMemory(cfg.memory, job.device, memories, here, cfg.engine.kv_cache_bytes)
    run.timers.around = run.memory.phase
    return run


def _finish(job: Job, run: Run, model: ShardedModel, extra: dict[str, Any] | None = None) -> None:
    if job.cfg.run.export:
        with run.timers("export"):
            folder = export_hf(model, Path(job.cfg.run.dir) / "hf", job.tokenizer, extra, job.initial.origin)
        job.say(f"exported {folder}")
    run.logger.close()


def run_sft(job: Job) -> None:
    cfg = job.cfg

    def load(path: str, key: str) -> SftDataset:
        dataset = SftDataset(sft_rows(rows_of(job, path, key), cfg.data), job.tokenizer, cfg.data, key)
        job.say(dataset.report)
        return dataset

    batches = make_batches(job, load(cfg.data.train, "data.train"), collate_sft)
    policy = make_policy(job, cfg.run.steps, hits=True)
    measures: list[Evaluate] = []
    if cfg.data.eval:
        measures.append(partial(held_out_loss, policy, load(cfg.data.eval, "data.eval"), cfg.eval.prompts))
        evaluator = make_evaluator(job, make_refit(job, policy.model)) if evaluation_functions(cfg) else None
        if evaluator is not None:
            measures.append(evaluator)
    run = _run(job, {"policy": policy.model}, {"data": batches.stream}, _all(measures))
    _guarded(run, lambda: sft(run, policy, batches))
    _finish(job, run, policy.model)


def run_rm(job: Job) -> None:
    cfg, loss = job.cfg, job.cfg.algorithm.reward_loss
    pairwise = loss.kind == "bradley_terry"

    def load(path: str, key: str) -> PreferenceDataset | ScoredDataset:
        rows = rows_of(job, path, key)
        if pairwise:
            dataset = PreferenceDataset(preference_rows(rows, cfg.data, loss.margin), job.tokenizer, cfg.data, key)
        else:
            dataset = ScoredDataset(scored_rows(rows, cfg.data, loss.attributes), job.tokenizer, cfg.data, key)
        job.say(dataset.report)
        return dataset

    train = load(cfg.data.train, "data.train")
    batches = make_batches(job, train, collate_preference if pairwise else collate_scored)
    outputs = 1 if pairwise else len(loss.attributes)
    head = Head("score", outputs)
    model = RewardModel(make_model(job, job.initial, head, cfg.optim, cfg.run.steps), cfg.batch)
    job.models["policy"] = model.model
    measures: list[Evaluate] = []
    if cfg.data.eval:
        measures.append(partial(pair_accuracy, model, load(cfg.data.eval, "data.eval"), cfg.eval.prompts, pairwise))
    run = _run(job, {"model": model.model}, {"data": batches.stream}, _all(measures))
    # a head that model.init lacks starts at zero where there is a Hugging Face folder, at random elsewhere
    zero_head = job.initial.folder is not None and "score.weight" not in open_hf(job.initial.folder)
    rm(run, model, batches, cfg.algorithm, FirstStepChecks(cfg.debug.first_step_checks and zero_head))
    bias, std = score_statistics(model, train, pairwise)
    job.say(f"mean score on the training set {bias:.4g} (stored as bias), std {std:.4g}")
    extra = {"bias": bias, "std": std, "attributes": list(loss.attributes)}
    run.checkpoints.describe(run.step, EXTRA_FILE, extra)
    _finish(job, run, model.model, extra)


def _all(measures: list[Evaluate]) -> Evaluate | None:
    if not measures:
        return None
    return lambda: {name: value for measure in measures for name, value in measure().items()}


def _origin(job: Job) -> Origin:
    cfg, shape = job.cfg, job.initial.config
    return Origin(
        _tokenizer_hash(job),
        shape.vocab_size,
        cfg.batch.prompts,
        cfg.batch.group,
        cfg.sampling.temperature,
        _digest(sorted(shape_of(shape).items())),
        cfg.stage.name,
    )


def _rollouts(
    job: Job, policy: Policy, reward_model: RewardModel | None
) -> tuple[Rollouts, dict[str, Any], Evaluator | None]:
    """The source of rollouts, those of its parts that a checkpoint keeps, and what evaluates between them."""
    cfg = job.cfg
    if cfg.debug.train_only:
        model = policy.model
        where = cfg.debug.train_only, cfg.run.steps, _origin(job), job.layout
        source = RecordedSource.open(*where, lambda: model.step_count, job.say)
        seen = same_view(cfg.debug.train_only, lambda: {p.name: file_fingerprint(p) for p in source.files})
        job.contents["debug.train_only"] = seen[source.files[0].name]
        return source, {}, None
    rewards = make_rewards(job, reward_model)
    prompts = make_prompts(job, cfg.data.train, "data.train")
    check_rows(rewards, prompts, len(prompts), job.say)
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    refit = make_refit(job, policy.model)
    verifier = make_verifier(job, refit, policy, prompts)
    source = RolloutSource(
        refit.engine,
        refit,
        verifier,
        prompts,
        make_stream(job, len(prompts), cfg.batch.prompts),
        rewards,
        job.tokenizer,
        make_sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens),
        cfg.batch,
        job.layout,
        cfg.seed,
        cfg.algorithm,
        job.timers,
    )
    count = cfg.debug.record or (cfg.run.steps if cfg.debug.rollout_only else 0)
    state = {"data": source.stream, "rewards": rewards, "sentinel": verifier}
    found = _stored(job, source, state, policy.model)
    if count:
        folder = Path(cfg.run.dir) / FOLDER
        found = Recorder(found, folder, count, _origin(job), job.layout, job.tokenizer.pad_token_id)
    return found, state, make_evaluator(job, refit, reward_model)


def _stored(job: Job, source: RolloutSource, state: dict[str, Any], model: ShardedModel) -> Rollouts:
    """The source, which stores its rollouts where checkpoints may need them."""
    cfg = job.cfg
    folder = Path(cfg.run.dir) / PENDING
    pending = PendingRollouts(
        source,
        folder,
        _digest((rollout_key(cfg), sorted(job.contents.items()), job.initial.content)),
        _origin(job),
        job.layout,
        state,
        lambda: model.step_count,
        job.tokenizer.pad_token_id,
    )
    if cfg.run.resume != "auto":
        pending.clear()
    return pending if cfg.checkpoint.rollouts and cfg.checkpoint.every and not cfg.debug.rollout_only else source


def _attach(run: Run, source: Rollouts) -> None:
    source.timers = run.timers
    inner = source.source if isinstance(source, Recorder) else source
    if isinstance(inner, PendingRollouts):
        run.checkpoints.on_commit.append(inner.drop)


def _rollout_only(job: Job) -> None:
    """Nothing is trained, so nothing is saved, resumed or exported: a second start begins with the first rollout."""
    run_dir = Path(job.cfg.run.dir)
    if complete_checkpoints(run_dir / "checkpoints"):
        hint = f"To generate from one: model.init={run_dir}, and a new run.dir."
        raise ConfigError("run.dir", str(run_dir), "a folder without checkpoints with debug.rollout_only", hint)
    policy = make_policy(job, 0)
    source, _, evaluator = _rollouts(job, policy, make_reward_model(job))
    run = _run(job, {}, {}, evaluator)
    source.timers = run.timers
    rollout_only(run, source, policy, job.cfg)
    run.logger.close()


def run_grpo(job: Job) -> None:
    if job.cfg.debug.rollout_only:
        return _rollout_only(job)
    reward_model = make_reward_model(job)
    policy, reference = make_policy(job, optimizer_steps(job)), make_reference(job)
    source, state, evaluator = _rollouts(job, policy, reward_model)
    kl = KLController(job.cfg.algorithm.kl)
    run = _run(job, {"policy": policy.model}, state | {"kl": kl}, evaluator)
    _attach(run, source)
    _guarded(run, lambda: grpo(run, source, policy, reference, kl, job.cfg))
    _finish(job, run, policy.model)


def run_ppo(job: Job) -> None:
    if job.cfg.debug.rollout_only:
        return _rollout_only(job)
    cfg = job.cfg
    reward_model = make_reward_model(job)
    steps = optimizer_steps(job)
    warmup = steps // cfg.run.steps * cfg.critic.warmup_steps if cfg.run.steps else 0
    policy, reference = make_policy(job, steps - warmup), make_reference(job)
    critic = make_critic(job, steps)
    source, state, evaluator = _rollouts(job, policy, reward_model)
    kl = KLController(cfg.algorithm.kl)
    models = {"policy": policy.model, "critic": critic.model}
    run = _run(job, models, state | {"kl": kl}, evaluator)
    _attach(run, source)
    _guarded(run, lambda: ppo(run, source, policy, critic, reference, kl, cfg))
    _finish(job, run, policy.model)


def _guarded(run: Run, recipe: Callable[[], None]) -> None:
    """A reward or an engine that fails in the middle of a run, or the gate, costs nothing: the last whole step is saved
    first."""
    try:
        recipe()
    except (RewardError, MismatchError, MemoryLimitError, EngineError) as error:
        run.save_after(error)
        raise
