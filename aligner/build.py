"""The composition root: a frozen config becomes objects. The only place that picks concrete classes."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aligner.algorithms.first_step import FirstStepChecks
from aligner.algorithms.grpo import grpo
from aligner.algorithms.ppo import ppo
from aligner.algorithms.rm import rm
from aligner.algorithms.rollout_only import rollout_only
from aligner.algorithms.sft import sft
from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.config.freeze import rollout_key
from aligner.config.quantization import describe, quantized
from aligner.config.schema import ROLLOUT_STAGES, Config, ModelConfig, OptimConfig
from aligner.config.validate import evaluation_functions, minibatch_samples, validate_model
from aligner.data.batches import BatchSource
from aligner.data.collate import collate_preference, collate_scored, collate_sft
from aligner.data.dataset import PreferenceDataset, PromptDataset, ScoredDataset, SftDataset
from aligner.data.formats import preference_rows, prompt_rows, scored_rows, sft_rows
from aligner.data.readers import read_rows
from aligner.data.stream import IndexStream
from aligner.data.tokenizer import stop_token_ids
from aligner.engines.base import RolloutEngine
from aligner.engines.bridge import Bridge
from aligner.engines.native.fleet import FleetEngine
from aligner.engines.native.remote import RemoteEngine
from aligner.engines.quantized import QuantizedEngine, has_modelopt, make_quantizer
from aligner.engines.recorded import FOLDER as ANSWERS
from aligner.engines.recorded import RecordedEngine, RecordingEngine
from aligner.engines.trtllm import TrtllmEngine, require_package
from aligner.engines.trtllm_engine import TrtllmBuiltEngine
from aligner.errors import AlignerError, ConfigError, EngineError, MemoryLimitError, MismatchError, RewardError
from aligner.megatron.checkpoint import load_model
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.megatron.groups import (
    Layout,
    build_layout,
    init_distributed,
    leave_distributed,
    neighbours,
    split_world,
)
from aligner.megatron.model import Head, resolve_dtype
from aligner.megatron.offload import ModelMemory
from aligner.megatron.train import ShardedModel
from aligner.models.safetensors_io import open_hf
from aligner.ops.balance import row_costs
from aligner.ops.seeds import derive
from aligner.refit.export import export_hf
from aligner.refit.plan import EngineGrid, TrainerGrid
from aligner.refit.serve import Server
from aligner.refit.transfer import Refit, planned
from aligner.refit.verify import POWER, Verifier
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import load_function
from aligner.roles.critic import Critic
from aligner.roles.initial import InitialModel, resolve, shape_of
from aligner.roles.policy import Policy, Reference
from aligner.roles.reward_model import RewardModel
from aligner.rollout.evaluate import Evaluator
from aligner.rollout.heldout import held_out_loss, pair_accuracy, score_statistics
from aligner.rollout.pending import FOLDER as PENDING
from aligner.rollout.pending import PendingRollouts
from aligner.rollout.prepare import KLController
from aligner.rollout.record import FOLDER, Origin, Recorder
from aligner.rollout.replay import RecordedSource
from aligner.rollout.source import Rollouts, RolloutSource, raised_together
from aligner.run.alarms import Alarms
from aligner.run.checkpoints import Checkpoints
from aligner.run.contract import DONE, STOPPED
from aligner.run.loop import Evaluate, Run
from aligner.run.metrics import MetricsLogger
from aligner.run.phases import PhaseMemory
from aligner.run.stop import Boundary, Deadline, StopRequested, allocation_end, restarted
from aligner.run.timers import Timers
from aligner.run.watchdog import Watchdog
from aligner.types import SamplingParams, TrainBatch

SENTINEL_PROMPTS, SENTINEL_TOKENS = 8, 64
_TRTLLM = {engine.name: engine for engine in (TrtllmEngine, TrtllmBuiltEngine)}


@dataclass
class Job:
    """What every stage needs: the config, this rank, and the policy-to-be with its layout and tokenizer."""

    cfg: Config
    env: RankEnv
    device: torch.device
    layout: Layout | None  # None on a rank that only generates
    initial: InitialModel
    bridge: Bridge | None = None  # to the ranks that only generate, or from them
    boundary: Boundary = field(default_factory=Boundary)
    watchdog: Watchdog = field(init=False)
    timers: Timers = field(default_factory=Timers)
    models: dict[str, ShardedModel] = field(default_factory=dict)  # by role, for the memory's turns
    engine: RolloutEngine | None = None

    def __post_init__(self) -> None:
        cfg, env = self.cfg, self.env
        self.watchdog = Watchdog(cfg.cluster.watchdog, Path(cfg.run.dir), env.rank, env.world_size)

    @property
    def tokenizer(self) -> Any:
        return self.initial.tokenizer

    @property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.cfg.model.dtype)

    def say(self, text: object) -> None:
        if self.env.rank == 0:
            print(text, flush=True)


def start(cfg: Config, env: RankEnv) -> Job:
    """Join the other ranks, find the model and its tokenizer, and check what only they can tell."""
    if cfg.engine.name in _TRTLLM:
        require_package(cfg.engine.trtllm.python, cfg.engine.name)
    if cfg.cluster.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cfg.cluster.threads or max(1, (os.cpu_count() or 1) // env.local_world_size))
    if env.world_size > 1:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = env.master_addr, str(env.master_port)
    device = init_distributed(env.rank, env.world_size, env.local_rank, cfg.cluster.backend, cfg.cluster.timeout_s)
    bridge = Bridge(*split_world(cfg.engine.ranks), env.world_size - cfg.engine.ranks) if cfg.engine.ranks else None
    torch.manual_seed(derive(cfg.seed, "torch"))
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        # on CUDA torch calls the engine's cumulative sums nondeterministic, and would refuse them
        torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    initial = resolve(cfg.model, cfg.model.init, cfg.seed)
    validate_model(cfg, initial.config)
    generates = bridge is not None and bridge.generates
    return Job(cfg, env, device, None if generates else build_layout(cfg.parallel), initial, bridge)


def run_stage(cfg: Config, env: RankEnv, signals: StopSignals | None = None) -> int:
    """Build and run the configured stage to its end, or to the step at which it is asked to stop; returns the exit
    code. Raises AlignerError."""
    if cfg.run.resume == "never" and restarted():
        cfg.run.resume = "auto"  # `never` was for the first start of the job
    run_dir = Path(cfg.run.dir)
    if env.rank == 0:
        (run_dir / STOPPED).unlink(missing_ok=True)
        Watchdog.clear(run_dir)
    job = start(cfg, env)
    job.boundary = Boundary(signals or StopSignals(), Deadline(margin_s=cfg.cluster.margin_s))
    if env.rank == 0:
        job.boundary.deadline.end_s = allocation_end(cfg.cluster)
    job.watchdog.start()
    well = False
    try:
        if job.layout is None:
            return _serve(job)
        {"sft": _sft, "rm": _rm, "grpo": _grpo, "ppo": _ppo}[cfg.stage.name](job)
        if env.rank == 0:
            (run_dir / DONE).write_text(f"{cfg.stage.name}\n", encoding="utf-8")
        well = True
    except StopRequested as stopped:
        job.say(stopped)
        well = True
    except AlignerError as error:
        _tell(job, error)
        raise
    except Exception as error:
        _tell(job, error)
        job.watchdog.ask_for_stacks(repr(error))
        raise
    finally:
        job.watchdog.stop()
        if job.engine is not None:
            job.engine.close()
        if job.bridge is not None:
            job.bridge.dismiss(well)
        leave_distributed()
    return 0


def _tell(job: Job, error: Exception) -> None:
    if job.bridge is not None:
        job.bridge.tell(error)


# --- models -----------------------------------------------------------------------------------------------------------


def _model(job: Job, initial: InitialModel, head: Head, optim: OptimConfig | None, steps: int) -> ShardedModel:
    """With `optim` a model to train for `steps` optimizer steps, else a frozen one."""
    batch, source = job.cfg.batch, initial.source(head)
    rows = {"packed": batch.packing, "share": batch.share_prompts}
    model = ShardedModel(initial.config, job.layout, head, job.dtype, job.device, source, optim, steps, **rows)
    if initial.checkpoint is not None:
        same_head = initial.checkpoint.name == ("model" if head.kind == "score" else "policy")
        load_model(model, initial.checkpoint, with_optimizer=False, with_head=same_head)
    return model


def _policy(job: Job, steps: int, hits: bool = False) -> Policy:
    optim = None if job.cfg.debug.rollout_only else job.cfg.optim
    model = job.models["policy"] = _model(job, job.initial, Head(), optim, steps)
    temperature = job.cfg.sampling.temperature if job.cfg.stage.name in ROLLOUT_STAGES else 1.0
    return Policy(model, job.cfg.batch, temperature, entropy=not hits, hits=hits)


def _reference(job: Job) -> Reference | None:
    if job.cfg.algorithm.kl.coef == 0:
        return None
    model = job.models["reference"] = _model(job, job.initial, Head(), None, 0)
    return Reference(model, job.cfg.batch, job.cfg.sampling.temperature)


def _scorer(job: Job, path: str, key: str) -> InitialModel:
    """The shape and weights of a reward model; it must share the policy's tokenizer."""
    like = dataclasses.replace(job.cfg.model, tokenizer="")
    initial = resolve(like, path, job.cfg.seed, key=key)
    validate_model(job.cfg, initial.config, scorer=True)
    if initial.tokenizer.get_vocab() != job.tokenizer.get_vocab():
        raise ConfigError(key, path, "a model with the policy's tokenizer: scores are read from the same token ids")
    return initial


def _reward_model(job: Job) -> RewardModel | None:
    if not job.cfg.reward.model or job.cfg.debug.train_only:  # recordings come with their scores
        return None
    initial = _scorer(job, job.cfg.reward.model, "reward.model")
    model = job.models["reward"] = _model(job, initial, Head("score"), None, 0)
    return RewardModel(model, job.cfg.batch, *_centring(job, initial))


def _centring(job: Job, initial: InitialModel) -> tuple[float, float]:
    """(bias, scale) of a reward model's scores."""
    extra = initial.extra
    return extra.get("bias", 0.0), extra.get("std", 1.0) if job.cfg.reward.model_standardize else 1.0


# --- data and rewards -------------------------------------------------------------------------------------------------


def _prompts(job: Job, path: str, key: str) -> PromptDataset:
    dataset = PromptDataset(prompt_rows(read_rows(path, key), job.cfg.data), job.tokenizer, job.cfg.data, key)
    job.say(dataset.report)
    return dataset


def _stream(job: Job, size: int, batch: int) -> IndexStream:
    return IndexStream(size, derive(job.cfg.seed, "order"), job.cfg.data.shuffle, batch)


def _batches(job: Job, dataset: Any, collate: Callable[[Any, int], TrainBatch]) -> BatchSource:
    stream = _stream(job, len(dataset), job.cfg.batch.sequences)
    cost = partial(row_costs, model=job.initial.config)
    return BatchSource(dataset, stream, collate, job.tokenizer.pad_token_id, job.layout.dp_rank, job.layout.data, cost)


def _sum_over_data_ranks(job: Job, values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=job.device)
    dist.all_reduce(total, group=job.layout.pgs.dp)
    return total.tolist()


def _rewards(job: Job, model: RewardModel | None) -> RewardPipeline:
    found: list[tuple[Any, float]] = [
        (load_function(function, i), function.weight) for i, function in enumerate(job.cfg.reward.functions)
    ]
    if model is not None:
        found.append((model, job.cfg.reward.model_weight))
    return RewardPipeline(found, job.cfg.reward, reduce=partial(_sum_over_data_ranks, job))


# --- generation -------------------------------------------------------------------------------------------------------


def _engine(job: Job, model: ModelConfig) -> RolloutEngine:
    engine = _bare_engine(job, model)
    if quantized(job.cfg):
        quantize, by = make_quantizer(job.cfg.engine.quantization, has_modelopt())
        job.say(describe(job.cfg, by))
        engine = QuantizedEngine(engine, quantize, hashes=job.cfg.refit.verify == "checksum")
    if job.cfg.debug.record_answers:
        engine = RecordingEngine(engine, Path(job.cfg.run.dir) / ANSWERS, job.env.rank)
    job.engine = engine
    return engine


def _engine_dtype(job: Job) -> torch.dtype:
    name = job.cfg.engine.dtype
    return job.dtype if name == "auto" else resolve_dtype(name)


def _bare_engine(job: Job, model: ModelConfig) -> RolloutEngine:
    dtype = _engine_dtype(job)
    if job.bridge is not None:
        job.bridge.on_signal = job.boundary.signals.note
        return RemoteEngine(job.bridge, job.cfg.engine.tensor_parallel, dtype)
    if job.cfg.engine.name in _TRTLLM:
        return _trtllm_engine(job, model, dtype)
    if job.cfg.engine.name == "recorded":
        return RecordedEngine(model, job.cfg.engine.answers, dtype=dtype)
    return _native_engine(job, model, dtype)


def _native_engine(job: Job, model: ModelConfig, dtype: torch.dtype) -> FleetEngine:
    tokenizer = job.tokenizer
    engine = FleetEngine(
        model,
        job.cfg.engine,
        device=job.device,
        dtype=dtype,
        pad_id=tokenizer.pad_token_id,
        decode=tokenizer.decode,
        group=neighbours(job.cfg.engine.tensor_parallel),
    )
    engine.steal = not job.cfg.run.deterministic
    return engine


def _serve(job: Job) -> int:
    """On a rank that only generates: do what the trainer's ranks order, to their end; returns the exit code."""
    cfg, bridge, model = job.cfg, job.bridge, job.initial.config
    assert bridge is not None
    bridge.signal = lambda: job.boundary.signals.received
    dtype = _engine_dtype(job)
    job.engine = engine = _native_engine(job, model, dtype)
    p = cfg.parallel
    data = bridge.trainers // p.model_size
    trainer = TrainerGrid(model.num_layers, p.tensor, p.pipeline, p.context, data, p.expert)
    engines = EngineGrid(bridge.engines, cfg.engine.tensor_parallel)
    plan = partial(planned, trainer, engines, model, (job.dtype, dtype), job.device, cfg.refit, bridge)
    memory = PhaseMemory(cfg.memory, job.device, {}, engine, cfg.engine.kv_cache_bytes)
    memory.rank = bridge.rank
    job.timers.on_phase = job.watchdog.phase
    check_memory = lambda: memory.check(memory.take(alone=True))  # noqa: E731
    well = Server(bridge, engine, plan, cfg.refit, job.timers, memory.phase, check_memory)()
    bridge.leave(well)
    return 0 if well else 1


def _trtllm_engine(job: Job, model: ModelConfig, dtype: torch.dtype) -> TrtllmEngine:
    cfg, tokenizer = job.cfg, job.tokenizer
    response = max(cfg.sampling.max_response_tokens, cfg.eval.max_response_tokens)
    with raised_together(EngineError):
        engine = _TRTLLM[cfg.engine.name](
            model,
            cfg.engine,
            device=job.device,
            dtype=dtype,
            pad_id=tokenizer.pad_token_id,
            max_seq_len=max(cfg.data.max_prompt_tokens, SENTINEL_TOKENS) + response + 1,
            bucket_bytes=cfg.refit.bucket_bytes,
            checksums=cfg.refit.verify == "checksum",
            decode=tokenizer.decode,
        )
    if not engine.request_seeds:
        job.say(f"TensorRT-LLM {engine.version}: samples do not follow their seeds (docs/trtllm.md)")
        if cfg.run.deterministic:
            expected = f"false with TensorRT-LLM {engine.version}, whose sampler ignores the seeds of requests"
            raise ConfigError("run.deterministic", True, expected, "1.4 and engine.name=native follow them.")
    return engine


def _sampling(job: Job, temperature: float, limit: int, plain: bool = False) -> SamplingParams:
    s = job.cfg.sampling
    cut = {} if plain else {"top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
    return SamplingParams(limit, temperature, stop_token_ids=stop_token_ids(job.tokenizer), stop=tuple(s.stop), **cut)


def _refit(job: Job, model: ShardedModel) -> Refit:
    return Refit(model, _engine(job, model.cfg), job.cfg.refit, skip=job.cfg.debug.skip_refit)


def _verifier(job: Job, refit: Refit, policy: Policy, prompts: PromptDataset) -> Verifier:
    """Sentinel rows: the first prompts of the training set; logprobs at temperature 1 on both sides."""
    first = [prompts[i].tokens[:SENTINEL_TOKENS] for i in range(min(SENTINEL_PROMPTS, len(prompts)))]
    # a prompt of one token has no logprob to compare
    rows = [torch.tensor(row if len(row) > 1 else (*row, job.tokenizer.eos_token_id)) for row in first]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=job.tokenizer.pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    plain = Policy(policy.model, policy.batch, temperature=1.0)
    power = POWER * (3 if quantized(job.cfg) else 1)  # its noise is that of the rounding, and not of zero mean
    trainer = lambda t, n: plain.logprobs(TrainBatch(t, n, torch.zeros(len(n), 0)))  # noqa: E731
    return Verifier(refit, tokens, lengths, trainer, power=power)


def _evaluator(job: Job, refit: Refit, reward_model: RewardModel | None = None) -> Evaluator | None:
    functions = evaluation_functions(job.cfg)
    if not functions:
        return None
    rewards = RewardPipeline([(load_function(f, i), f.weight) for i, f in enumerate(functions)], job.cfg.reward)
    prompts = _prompts(job, job.cfg.data.eval, "data.eval")
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    limit = job.cfg.eval.max_response_tokens or job.cfg.sampling.max_response_tokens
    return Evaluator(
        refit.engine,
        refit,
        prompts,
        rewards,
        job.tokenizer,
        _sampling(job, job.cfg.eval.temperature, limit, plain=True),
        job.cfg.eval,
        job.layout,
        job.cfg.seed,
        reward_model,
        job.timers,
    )


# --- stages -----------------------------------------------------------------------------------------------------------


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


def _run(job: Job, models: dict[str, ShardedModel], state: dict[str, Any], evaluate: Evaluate | None) -> Run:
    cfg, run_dir = job.cfg, Path(job.cfg.run.dir)
    alarms = Alarms(cfg.sampling.max_response_tokens, cfg.critic.warmup_steps)
    checkpoints = Checkpoints(run_dir, cfg.checkpoint, models, state | {"alarms": alarms}, _identity(job))
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


def _sft(job: Job) -> None:
    cfg = job.cfg

    def load(path: str, key: str) -> SftDataset:
        dataset = SftDataset(sft_rows(read_rows(path, key), cfg.data), job.tokenizer, cfg.data, key)
        job.say(dataset.report)
        return dataset

    batches = _batches(job, load(cfg.data.train, "data.train"), collate_sft)
    policy = _policy(job, cfg.run.steps, hits=True)
    measures: list[Evaluate] = []
    if cfg.data.eval:
        measures.append(partial(held_out_loss, policy, load(cfg.data.eval, "data.eval"), cfg.eval.prompts))
        evaluator = _evaluator(job, _refit(job, policy.model)) if evaluation_functions(cfg) else None
        if evaluator is not None:
            measures.append(evaluator)
    run = _run(job, {"policy": policy.model}, {"data": batches.stream}, _all(measures))
    _guarded(run, lambda: sft(run, policy, batches))
    _finish(job, run, policy.model)


def _rm(job: Job) -> None:
    cfg, loss = job.cfg, job.cfg.algorithm.reward_loss
    pairwise = loss.kind == "bradley_terry"

    def load(path: str, key: str) -> PreferenceDataset | ScoredDataset:
        rows = read_rows(path, key)
        if pairwise:
            dataset = PreferenceDataset(preference_rows(rows, cfg.data, loss.margin), job.tokenizer, cfg.data, key)
        else:
            dataset = ScoredDataset(scored_rows(rows, cfg.data, loss.attributes), job.tokenizer, cfg.data, key)
        job.say(dataset.report)
        return dataset

    train = load(cfg.data.train, "data.train")
    batches = _batches(job, train, collate_preference if pairwise else collate_scored)
    outputs = 1 if pairwise else len(loss.attributes)
    head = Head("score", outputs)
    model = RewardModel(_model(job, job.initial, head, cfg.optim, cfg.run.steps), cfg.batch)
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
    _finish(job, run, model.model, {"bias": bias, "std": std, "attributes": list(loss.attributes)})


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
        return RecordedSource.open(*where, lambda: model.step_count, job.say), {}, None
    rewards = _rewards(job, reward_model)
    prompts = _prompts(job, cfg.data.train, "data.train")
    rewards.probe([prompts[0], prompts[len(prompts) - 1]])
    refit = _refit(job, policy.model)
    verifier = _verifier(job, refit, policy, prompts)
    source = RolloutSource(
        refit.engine,
        refit,
        verifier,
        prompts,
        _stream(job, len(prompts), cfg.batch.prompts),
        rewards,
        job.tokenizer,
        _sampling(job, cfg.sampling.temperature, cfg.sampling.max_response_tokens),
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
    return found, state, _evaluator(job, refit, reward_model)


def _stored(job: Job, source: RolloutSource, state: dict[str, Any], model: ShardedModel) -> Rollouts:
    """The source, which stores its rollouts where checkpoints may need them."""
    cfg = job.cfg
    folder = Path(cfg.run.dir) / PENDING
    pending = PendingRollouts(
        source,
        folder,
        rollout_key(cfg),
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


def _optimizer_steps(job: Job) -> int:
    samples = job.cfg.batch.prompts * job.cfg.batch.group
    return job.cfg.run.steps * job.cfg.batch.epochs * (samples // minibatch_samples(job.cfg))


def _rollout_only(job: Job) -> None:
    """Nothing is trained, so nothing is saved, resumed or exported: a second start begins with the first rollout."""
    run_dir = Path(job.cfg.run.dir)
    if complete_checkpoints(run_dir / "checkpoints"):
        hint = f"To generate from one: model.init={run_dir}, and a new run.dir."
        raise ConfigError("run.dir", str(run_dir), "a folder without checkpoints with debug.rollout_only", hint)
    policy = _policy(job, 0)
    source, _, evaluator = _rollouts(job, policy, _reward_model(job))
    run = _run(job, {}, {}, evaluator)
    source.timers = run.timers
    rollout_only(run, source, policy, job.cfg)
    run.logger.close()


def _grpo(job: Job) -> None:
    if job.cfg.debug.rollout_only:
        return _rollout_only(job)
    reward_model = _reward_model(job)
    policy, reference = _policy(job, _optimizer_steps(job)), _reference(job)
    source, state, evaluator = _rollouts(job, policy, reward_model)
    kl = KLController(job.cfg.algorithm.kl)
    run = _run(job, {"policy": policy.model}, state | {"kl": kl}, evaluator)
    _attach(run, source)
    _guarded(run, lambda: grpo(run, source, policy, reference, kl, job.cfg))
    _finish(job, run, policy.model)


def _ppo(job: Job) -> None:
    if job.cfg.debug.rollout_only:
        return _rollout_only(job)
    cfg = job.cfg
    reward_model = _reward_model(job)
    steps = _optimizer_steps(job)
    warmup = steps // cfg.run.steps * cfg.critic.warmup_steps if cfg.run.steps else 0
    policy, reference = _policy(job, steps - warmup), _reference(job)
    critic = _critic(job, steps)
    source, state, evaluator = _rollouts(job, policy, reward_model)
    kl = KLController(cfg.algorithm.kl)
    models = {"policy": policy.model, "critic": critic.model}
    run = _run(job, models, state | {"kl": kl}, evaluator)
    _attach(run, source)
    _guarded(run, lambda: ppo(run, source, policy, critic, reference, kl, cfg))
    _finish(job, run, policy.model)


def _critic(job: Job, steps: int) -> Critic:
    """From `critic.init`, by default the reward model; it then speaks in the reward model's centred, scaled scores."""
    path = job.cfg.critic.init or job.cfg.reward.model
    initial = _scorer(job, path, "critic.init" if job.cfg.critic.init else "reward.model")
    model = job.models["critic"] = _model(job, initial, Head("score"), job.cfg.critic.optim, steps)
    bias, scale = _centring(job, initial) if path == job.cfg.reward.model else (0.0, 1.0)
    return Critic(model, job.cfg.batch, bias, scale)


def _guarded(run: Run, recipe: Callable[[], None]) -> None:
    """A reward or an engine that fails in the middle of a run, or the gate, costs nothing: the last whole step is saved
    first."""
    try:
        recipe()
    except (RewardError, MismatchError, MemoryLimitError, EngineError) as error:
        run.save_after(error)
        raise
