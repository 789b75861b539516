"""A job: the config, this rank, and the common needs of all stages."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aligner.answers import FOLDER, AnswerLog
from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.cluster.threads import use as use_threads
from aligner.config.derived import undecided
from aligner.config.engines import ENGINES
from aligner.config.identity import uses
from aligner.config.on_demand import imported, on_demand
from aligner.config.own_stage import typed_args
from aligner.config.schema import Config
from aligner.config.validate_model import check_node, validate_model, validate_on_gpu
from aligner.data.dialogue import Dialogue
from aligner.data.row_reader import DataReport
from aligner.data.shipped_templates import use_chat_template
from aligner.data.template_checks import describe
from aligner.engines.base import RolloutEngine
from aligner.families.table import parameters
from aligner.megatron.groups import Layout, build_layout, init_distributed, leave_distributed, split_world
from aligner.megatron.lora import check_adapters
from aligner.megatron.model import check_kernels, check_optimizer, resolve_dtype
from aligner.megatron.quantized_base import check_held
from aligner.megatron.train import ShardedModel
from aligner.ops.seeds import derive
from aligner.roles.model_init import InitialModel, resolve
from aligner.run.chain import StepHashes
from aligner.run.checkpoints import Stateful
from aligner.run.starts import Start, start_record
from aligner.run.stop import Boundary, Deadline, allocation_end, uptime_s
from aligner.run.timers import Timers
from aligner.run.watchdog import Watchdog
from aligner.user_code import is_path

if TYPE_CHECKING:
    from aligner.engines.bridge import Bridge

POLICY = "policy"  # role whose engine generates rollouts
LAST_WORDS_S = 60.0  # for ending a late child and reporting it


@dataclass(frozen=True)
class Tooling:
    """Tools that prompts describe to the model."""

    schemas: list[dict[str, Any]]
    dialogue: Dialogue  # with these tools
    scores: bool  # whether the environment rewards


@dataclass(frozen=True)
class BuildRecord:
    """Notes of builders on what they build, for the run that they build last. Nothing is removed except a model that
    is freed."""

    models: dict[str, ShardedModel] = field(default_factory=dict)  # by role, for `PhaseMemory`
    engines: dict[str, RolloutEngine] = field(default_factory=dict)  # POLICY's; judges' with weights of their own
    state: dict[str, Stateful] = field(default_factory=dict)  # kept in checkpoints besides the stage's own
    on_step: list[Callable[[int], None]] = field(default_factory=list)  # called with the finished step
    on_save: list[Callable[[int], None]] = field(default_factory=list)  # called with the step of one to be written
    on_commit: list[Callable[[int], None]] = field(default_factory=list)  # called with the step of a whole checkpoint
    frozen: list[str] = field(default_factory=list)  # of each model with adapters: the identity of its other weights
    contents: dict[str, str] = field(default_factory=dict)  # key of a path -> hash of its content in this run
    # key of `batch` with the rows of a step -> number of rows, and how many of a step each of them makes
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)


class JobOutput:
    """Output of a job on the terminal, by rank 0."""

    def __init__(self, rank: int, tokenizer: Any, template_arguments: Mapping[str, Any]):
        self.rank, self.tokenizer, self.template_arguments = rank, tokenizer, template_arguments
        self._reported: set[str] = set()

    def say(self, text: object) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def say_rows(self, report: DataReport) -> None:
        """Print the report of a data set's rows, and before the first with conversations a description of the chat
        template. A line is printed once, also of a file that is read for two purposes."""
        about = describe(self.tokenizer, self.template_arguments) if report.conversations else ()
        for line in map(str, (*about, report)):
            if line not in self._reported:
                self._reported.add(line)
                self.say(line)


@dataclass(frozen=True)
class Job:
    """Common needs of all stages: the config, this rank, and the initial policy with its layout and tokenizer."""

    cfg: Config
    env: RankEnv
    device: torch.device
    layout: Layout | None  # None on a rank that only generates
    initial: InitialModel
    bridge: Bridge | None  # to the ranks that only generate, or from them
    watchdog: Watchdog
    boundary: Boundary
    start: Start  # rank 0 of a run has a real one
    answers: AnswerLog  # of tools, environments, judges and servers
    seen: StepHashes  # of this step
    output: JobOutput
    timers: Timers = field(default_factory=Timers)
    built: BuildRecord = field(default_factory=BuildRecord)

    @property
    def tokenizer(self) -> Any:
        return self.initial.tokenizer

    @property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.cfg.model.dtype)

    @cached_property
    def tooling(self) -> Tooling | None:
        """Tools and environment, made before prompts. Raises EnvironmentCodeError, ConfigError."""
        return on_demand("environment")(self.cfg, self.env, self.tokenizer) if self.cfg.environment.on else None

    @cached_property
    def args(self) -> Any:
        """`stage.args` as the section of a stage in a user's file, None without one."""
        return typed_args(self.cfg)

    def say(self, text: object) -> None:
        self.output.say(text)


def start(cfg: Config, env: RankEnv, signals: StopSignals | None = None) -> Job:
    """Join the other ranks, resolve the model and its tokenizer, and check what depends on them. The caller leaves
    the other ranks when the job is done. With `signals` it is a run's, which notes its start."""
    if cfg.engine.child is not None:
        imported(ENGINES[cfg.engine.name].made_by).require(cfg.engine)
    if is_path(cfg.engine.name):
        on_demand("engine.name, to check")(cfg)
    first = env.rank - env.local_rank
    check_node(cfg, range(first, first + env.local_world_size), env.world_size)
    use_threads(cfg.cluster.threads, env.local_world_size)
    device = init_distributed(env, cfg.cluster.backend, _timeout_s(cfg), Path(cfg.run.dir))
    try:
        sizes = on_demand("auto")(cfg, env, device) if undecided(cfg) else ""
        job = _joined(cfg, env, device, signals)
        if sizes:
            job.say(sizes)
        return job
    except BaseException:
        leave_distributed()
        raise


def _timeout_s(cfg: Config) -> float:
    """Return the timeout of collectives: in one, ranks wait for another rank's child, or for the report that it is
    late."""
    child = cfg.engine.child
    return cfg.cluster.timeout_s if child is None else max(cfg.cluster.timeout_s, child.longest_s + LAST_WORDS_S)


def _joined(cfg: Config, env: RankEnv, device: torch.device, signals: StopSignals | None) -> Job:
    bridge: Bridge | None = None
    if cfg.engine.ranks:
        engine = cfg.engine
        trainers = env.world_size - engine.ranks
        ranks = split_world(engine.ranks)
        bridge = on_demand("engine.ranks, between ranks")(*ranks, trainers, engine.tensor_parallel, engine.silent_s)
        bridge.begin()
        if engine.child is not None:
            bridge.fill_by_node()
    torch.manual_seed(derive(cfg.seed, "torch"))
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        # on CUDA torch considers the engine's cumulative sums nondeterministic, and would refuse them
        torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    initial = resolve(cfg.model, cfg.model.init, cfg.seed)
    use_chat_template(initial.tokenizer, cfg.data)
    validate_model(cfg, initial.config)
    if uses(cfg.stage.name, "engine.draft_model") and cfg.engine.draft_model:
        heads = cfg.engine.child is not None
        on_demand("engine.draft_model, to check")(cfg.engine.draft_model, initial.tokenizer, heads)
    if device.type == "cuda":
        validate_on_gpu(cfg, initial.config)
    if cfg.model.lora.rank:
        check_adapters(initial.config, resolve_dtype(cfg.model.dtype), device)
        check_held(initial.config, cfg.parallel.tensor)
    generates = bridge is not None and bridge.generates
    if not generates:
        check_kernels(initial.config, resolve_dtype(cfg.model.dtype), device)
        for key, optim in {"optim": cfg.optim, "critic.optim": cfg.critic.optim}.items():
            if uses(cfg.stage.name, f"{key}.megatron"):
                check_optimizer(key, optim)
        if cfg.logging.trackers:
            on_demand("logging.trackers, to check")(cfg.logging)
        uses_key = partial(uses, cfg.stage.name)
        if cfg.algorithm.own_functions(uses_key) or (uses_key("algorithm.args") and cfg.algorithm.args):
            on_demand("algorithm.args")(cfg.algorithm)
    layout, run_dir = None if generates else build_layout(cfg.parallel), Path(cfg.run.dir)
    watchdog = Watchdog(cfg.cluster.watchdog, run_dir, env.rank, env.world_size)
    return Job(
        cfg,
        env,
        device,
        layout,
        initial,
        bridge,
        watchdog,
        Boundary() if signals is None else Boundary(signals, _deadline(cfg, env), watchdog.clock.now),
        Start("", 1, {}) if signals is None or env.rank else _noted(cfg, env, device, initial),
        AnswerLog(run_dir / FOLDER, env.rank),
        StepHashes(counts=layout is not None and layout.peers.rank() == 0),
        JobOutput(env.rank, initial.tokenizer, cfg.data.template_arguments),
    )


def _noted(cfg: Config, env: RankEnv, device: torch.device, initial: InitialModel) -> Start:
    facts = {"parameters": parameters(initial.config)}
    return Start(cfg.run.dir, env.rank, start_record(env.world_size, device, **facts))


def _deadline(cfg: Config, env: RankEnv) -> Deadline:
    """Return the end of the allocation, which rank 0 reads."""
    end_s = allocation_end(cfg.cluster) if env.rank == 0 else None
    return Deadline(None if end_s is None else uptime_s() + end_s - time.time(), margin_s=cfg.cluster.margin_s)


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def tokenizer_hash(job: Job) -> str:
    return digest(sorted(job.tokenizer.get_vocab().items()))
