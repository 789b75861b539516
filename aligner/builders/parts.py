"""From a frozen config to a job and its parts: models in their roles, data, rewards."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aligner.cluster.env import RankEnv
from aligner.cluster.seal import job_secret
from aligner.cluster.threads import use as use_threads
from aligner.config.data import DataConfig
from aligner.config.derived import minibatch_samples
from aligner.config.schema import ROLLOUT_STAGES, Config, OptimConfig
from aligner.config.validate_model import validate_model, validate_on_gpu
from aligner.data.batches import BatchSource
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.data.mixture import Mixture, PromptMixture
from aligner.data.readers import Rows, read_rows
from aligner.data.shipped_templates import use_chat_template
from aligner.data.stream import IndexStream, MixedStream, Stream
from aligner.data.tokenizer import stop_token_ids
from aligner.engines.base import RolloutEngine
from aligner.engines.bridge import Bridge
from aligner.engines.trtllm.built import TrtllmBuiltEngine
from aligner.engines.trtllm.torch_backend import TrtllmEngine, require_package
from aligner.errors import ConfigError
from aligner.megatron.checkpoint import load_model
from aligner.megatron.groups import Layout, build_layout, init_distributed, leave_distributed, split_world
from aligner.megatron.model import Head, check_kernels, resolve_dtype
from aligner.megatron.train import ShardedModel
from aligner.ops.agree import same_view
from aligner.ops.balance import row_costs
from aligner.ops.seeds import derive
from aligner.refit.export import EXTRA_FILE
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import load_function
from aligner.roles.critic import Critic
from aligner.roles.initial import InitialModel, resolve
from aligner.roles.policy import Policy, Reference
from aligner.roles.reward_model import RewardModel
from aligner.run.starts import Start
from aligner.run.stop import Boundary
from aligner.run.timers import Timers
from aligner.run.watchdog import Watchdog
from aligner.types import SamplingParams, TrainBatch

TRTLLM_ENGINES = {engine.name: engine for engine in (TrtllmEngine, TrtllmBuiltEngine)}


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
    start: Start = field(default_factory=lambda: Start("", 1, {}))  # rank 0 has a real one
    on_commit: list[Callable[[int], None]] = field(default_factory=list)  # called with the step of a whole checkpoint
    contents: dict[str, str] = field(default_factory=dict)  # key of a path -> hash of what this run finds there

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
    """Join the other ranks, find the model and its tokenizer, and check what only they can tell. Who gets a job leaves
    the others when it is done."""
    if cfg.engine.name in TRTLLM_ENGINES:
        require_package(cfg.engine.trtllm.python, cfg.engine.name)
    use_threads(cfg.cluster.threads, env.local_world_size)
    if env.world_size > 1:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = env.master_addr, str(env.master_port)
    who = env.rank, env.world_size, env.local_rank, cfg.cluster.backend, cfg.cluster.timeout_s
    device = init_distributed(*who, env.one_host, lambda: job_secret(Path(cfg.run.dir)))
    try:
        return _joined(cfg, env, device)
    except BaseException:
        leave_distributed()
        raise


def _joined(cfg: Config, env: RankEnv, device: torch.device) -> Job:
    bridge = Bridge(*split_world(cfg.engine.ranks), env.world_size - cfg.engine.ranks) if cfg.engine.ranks else None
    torch.manual_seed(derive(cfg.seed, "torch"))
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        # on CUDA torch calls the engine's cumulative sums nondeterministic, and would refuse them
        torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    initial = resolve(cfg.model, cfg.model.init, cfg.seed)
    use_chat_template(initial.tokenizer, cfg.data)
    validate_model(cfg, initial.config)
    if device.type == "cuda":
        validate_on_gpu(cfg, initial.config)
    generates = bridge is not None and bridge.generates
    if not generates:
        check_kernels(initial.config, resolve_dtype(cfg.model.dtype), device)
    return Job(cfg, env, device, None if generates else build_layout(cfg.parallel), initial, bridge)


def make_model(job: Job, initial: InitialModel, head: Head, optim: OptimConfig | None, steps: int) -> ShardedModel:
    """With `optim` a model to train for `steps` optimizer steps, else a frozen one."""
    batch, source = job.cfg.batch, initial.source(head)
    rows = {"packed": batch.packing, "share": batch.share_prompts}
    model = ShardedModel(initial.config, job.layout, head, job.dtype, job.device, source, optim, steps, **rows)
    if initial.checkpoint is not None:
        same_head = initial.checkpoint.name == ("model" if head.kind == "score" else "policy")
        load_model(model, initial.checkpoint, with_optimizer=False, with_head=same_head)
    return model


def _temperature(cfg: Config) -> float:
    """Of the policy's distribution while it learns."""
    return cfg.sampling.temperature if cfg.stage.name in ROLLOUT_STAGES else 1.0


def make_policy(job: Job, steps: int, **outputs: bool) -> Policy:
    """`outputs`: which of the policy's an update finds (`Policy`)."""
    optim = None if job.cfg.debug.rollout_only else job.cfg.optim
    model = job.models["policy"] = make_model(job, job.initial, Head(), optim, steps)
    return Policy(model, job.cfg.batch, _temperature(job.cfg), **outputs)


def make_reference(job: Job) -> Reference:
    model = job.models["reference"] = make_model(job, job.initial, Head(), None, 0)
    return Reference(model, job.cfg.batch, _temperature(job.cfg))


def _scorer(job: Job, path: str, key: str) -> InitialModel:
    """The shape and weights of a reward model; it must share the policy's tokenizer."""
    like = dataclasses.replace(job.cfg.model, tokenizer="")
    initial = resolve(like, path, job.cfg.seed, key=key)
    job.contents[key] = initial.content
    validate_model(job.cfg, initial.config, scorer=True)
    if job.device.type == "cuda":
        validate_on_gpu(job.cfg, initial.config)
    if initial.tokenizer.get_vocab() != job.tokenizer.get_vocab():
        raise ConfigError(key, path, "a model with the policy's tokenizer: scores are read from the same token ids")
    return initial


def make_reward_model(job: Job) -> RewardModel | None:
    if not job.cfg.reward.model or job.cfg.debug.train_only:  # recordings come with their scores
        return None
    path = job.cfg.reward.model
    initial = _scorer(job, path, "reward.model")
    if not initial.has_scores:
        raise ConfigError("reward.model", path, "a reward model: a run of stage rm, or a folder with score.weight")
    if not initial.extra:
        job.say(f"reward.model={path}: no {EXTRA_FILE} says the mean of its scores: they are not centred")
    model = job.models["reward"] = make_model(job, initial, Head("score"), None, 0)
    return RewardModel(model, job.cfg.batch, *_centring(job, initial))


def _centring(job: Job, initial: InitialModel) -> tuple[float, float]:
    """(bias, scale) of a reward model's scores."""
    extra = initial.extra
    return extra.get("bias", 0.0), extra.get("std", 1.0) if job.cfg.reward.model_standardize else 1.0


def make_scorer(job: Job, outputs: int) -> RewardModel:
    """The model of `model.init` with a head of so many scores, to be trained."""
    model = make_model(job, job.initial, Head("score", outputs), job.cfg.optim, job.cfg.run.steps)
    job.models["policy"] = model
    return RewardModel(model, job.cfg.batch)


def rows_of(job: Job, path: str, key: str) -> Rows:
    """The rows of a dataset, the same on every rank. Raises DataError, ViewError."""
    found: list[Rows] = []

    def look() -> dict[str, str]:
        found[:] = [read_rows(path, key)]
        return {key: found[0].content()}

    job.contents[key] = same_view(path, look)[key]
    return found[0]


def make_training_set[D](job: Job, build: Callable[[str, str, DataConfig], D]) -> D | Mixture:
    """`build(path, key, data)` a dataset of data.train, or of each of data.sources to mix them."""
    data = job.cfg.data
    if not data.sources:
        return build(data.train, "data.train", data)
    parts = {
        source.label: build(source.path, f"data.sources.{source.label}", data.of(source)) for source in data.sources
    }
    prompts = all(isinstance(part, PromptDataset) for part in parts.values())
    return (PromptMixture if prompts else Mixture)(parts, [source.weight for source in data.sources])


def make_prompts(job: Job, path: str, key: str, data: DataConfig) -> PromptDataset:
    dataset = PromptDataset(prompt_rows(rows_of(job, path, key), data), job.tokenizer, data, key)
    job.say(dataset.report)
    return dataset


def make_stream(job: Job, dataset: Sequence, batch: int) -> Stream:
    seed, shuffle = job.cfg.seed, job.cfg.data.shuffle
    if not isinstance(dataset, Mixture):
        return IndexStream(len(dataset), derive(seed, "order"), shuffle, batch)
    streams = {n: IndexStream(len(part), derive(seed, "order", n), shuffle) for n, part in dataset.parts.items()}
    return MixedStream(streams, dataset.weights, batch)


def in_shares(job: Job, dataset: Mixture, count: int) -> list:
    """So many rows of a mixture, each source with its share."""
    return [dataset[int(row)] for row in make_stream(job, dataset, count).next()]


def make_batches(job: Job, dataset: Any, collate: Callable[[Any, int], TrainBatch]) -> BatchSource:
    stream = make_stream(job, dataset, job.cfg.batch.sequences)
    cost = partial(row_costs, model=job.initial.config)
    return BatchSource(dataset, stream, collate, job.tokenizer.pad_token_id, job.layout.dp_rank, job.layout.data, cost)


def _sum_over_data_ranks(job: Job, values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=job.device)
    dist.all_reduce(total, group=job.layout.pgs.dp)
    return total.tolist()


def make_rewards(job: Job, model: RewardModel | None) -> RewardPipeline:
    found: list[tuple[Any, float]] = [
        (load_function(function, i), function.weight) for i, function in enumerate(job.cfg.reward.functions)
    ]
    if model is not None:
        found.append((model, job.cfg.reward.model_weight))
    return RewardPipeline(found, job.cfg.reward, reduce=partial(_sum_over_data_ranks, job))


def make_sampling(job: Job, temperature: float, limit: int, plain: bool = False) -> SamplingParams:
    s = job.cfg.sampling
    cut = {} if plain else {"top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
    return SamplingParams(limit, temperature, stop_token_ids=stop_token_ids(job.tokenizer), stop=tuple(s.stop), **cut)


def optimizer_steps(job: Job) -> int:
    samples = job.cfg.batch.prompts * job.cfg.batch.group
    return job.cfg.run.steps * job.cfg.batch.epochs * (samples // minibatch_samples(job.cfg))


def make_critic(job: Job, steps: int) -> Critic:
    """From `critic.init`, by default the reward model; it then speaks in the reward model's centred, scaled scores."""
    path = job.cfg.critic.init or job.cfg.reward.model
    initial = _scorer(job, path, "critic.init" if job.cfg.critic.init else "reward.model")
    model = job.models["critic"] = make_model(job, initial, Head("score"), job.cfg.critic.optim, steps)
    bias, scale = _centring(job, initial) if path == job.cfg.reward.model else (0.0, 1.0)
    return Critic(model, job.cfg.batch, bias, scale)


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def tokenizer_hash(job: Job) -> str:
    return digest(sorted(job.tokenizer.get_vocab().items()))
