"""The typed config. A section is its keys, their types, defaults, meanings and checks in one file of `sections/`; what
needs several sections is in `validate.py`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass, replace

from aligner.config.adapters import settle_reference
from aligner.config.checks import at_least, one_of
from aligner.config.quantization import settle
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.config.sections.cluster import ClusterConfig
from aligner.config.sections.critic import CriticConfig
from aligner.config.sections.data import DataConfig
from aligner.config.sections.debug import DebugConfig
from aligner.config.sections.ema import EmaConfig
from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.environment import EnvironmentConfig
from aligner.config.sections.logging import LoggingConfig
from aligner.config.sections.memory import MemoryConfig
from aligner.config.sections.mismatch import MismatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.config.sections.ptx import PtxConfig
from aligner.config.sections.rewards import EvalConfig, RewardConfig
from aligner.config.sections.run import RunConfig
from aligner.config.sections.sampling import SamplingConfig
from aligner.config.stages import STAGES
from aligner.errors import ConfigError

ROLLOUT_STAGES = tuple(name for name, stage in STAGES.items() if stage.rollouts)


@dataclass
class _StageName:
    name: str = "sft"  # which one: a file of conf/stage

    def __post_init__(self) -> None:
        one_of("stage.name", self.name, tuple(STAGES))


# the name, and the sections of stages that have keys of their own
StageConfig = make_dataclass(
    "StageConfig",
    [(name, stage.section, field(default_factory=stage.section)) for name, stage in STAGES.items() if stage.section],
    bases=(_StageName,),
    module=__name__,
)


@dataclass
class Config:
    seed: int = 0  # of data order, weights and sampling; every draw is derived from it by what it is for
    run: RunConfig = field(default_factory=RunConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    ptx: PtxConfig = field(default_factory=PtxConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.debug.train_only:
            self.engine = replace(self.engine, name="recorded", cuda_graphs=False)
        elif self.engine.can.replays and not self.engine.answers:
            expected = "a recorded rollout, or a folder of them, with engine.name=recorded (or engine.answers)"
            raise ConfigError("debug.train_only", "", expected)
        if self.engine.answers and (not self.engine.can.replays or self.debug.train_only):
            expected = "empty but with engine.name=recorded, and with debug.train_only"
            raise ConfigError("engine.answers", self.engine.answers, expected)
        if self.debug.record_answers and self.engine.can.replays:
            raise ConfigError("debug.record_answers", True, "false with engine.name=recorded")
        settle(self)
        settle_reference(self)
