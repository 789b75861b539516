"""The typed config. A section is its keys, their types, defaults, meanings and checks in one file of `sections/`;
checks of several sections are in `validate.py`. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import Any

from aligner.config.key import IGNORE, REFUSE, REPORT, Section, key, section
from aligner.config.quantization import settle
from aligner.config.rule import rules
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.config.sections.cluster import ClusterConfig
from aligner.config.sections.critic import CriticConfig
from aligner.config.sections.curriculum import CurriculumConfig
from aligner.config.sections.data import DataConfig
from aligner.config.sections.debug import DebugConfig
from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.environment import EnvironmentConfig
from aligner.config.sections.logging import LoggingConfig
from aligner.config.sections.memory import MemoryConfig
from aligner.config.sections.mismatch import MismatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import EmaConfig, OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.config.sections.ptx import PtxConfig
from aligner.config.sections.rewards import EvalConfig, RewardConfig
from aligner.config.sections.run import RunConfig
from aligner.config.sections.sampling import SamplingConfig
from aligner.config.stage import OWN, Stage
from aligner.config.stages import STAGES

ROLLOUT_STAGES = tuple(name for name, stage in STAGES.items() if stage.rollouts)


@dataclass
class _StageName(Section, key="stage"):
    name: str = key(
        "sft", "Stage to run: a file of conf/stage, or of yours.", choices=tuple(STAGES), file=True, resume=IGNORE
    )
    args: dict[str, Any] = key(
        {}, "Keys of a stage in a file of yours, typed there by STAGE's section.", read_for=(OWN,)
    )

    @property
    def its(self) -> Stage:
        return STAGES[self.name]


# the name, and the sections of stages that have keys of their own
StageConfig = make_dataclass(
    "StageConfig",
    [
        (name, stage.section, section(stage.section, read_for=(f"stage.{name}",)))
        for name, stage in STAGES.items()
        if stage.section
    ],
    bases=(_StageName,),
    module=__name__,
)


@dataclass
class Config(Section):
    """All keys of a run (docs/reference/keys.md)."""

    seed: int = key(0, "Seed of all random choices. Each derives its own from it, by purpose.", least=0, resume=REFUSE)
    run: RunConfig = section(RunConfig, resume=REPORT, rollouts=False)
    stage: StageConfig = section(StageConfig, resume=REFUSE)
    model: ModelConfig = section(ModelConfig, resume=IGNORE)  # except some keys: the identity of checkpoints has them
    parallel: ParallelConfig = section(ParallelConfig, resume=REPORT, rollouts=False)
    optim: OptimConfig = section(OptimConfig, resume=REPORT, read_for=("training",))
    ema: EmaConfig = section(EmaConfig, resume=REPORT, read_for=("training",))
    critic: CriticConfig = section(CriticConfig, resume=REFUSE, read_for=("critic",))
    batch: BatchConfig = section(BatchConfig, resume=REFUSE)
    sampling: SamplingConfig = section(SamplingConfig, resume=REFUSE, read_for=("generation",))
    algorithm: AlgorithmConfig = section(AlgorithmConfig, resume=REFUSE, read_for=("policy",))
    engine: EngineConfig = section(EngineConfig, resume=REPORT, read_for=("generation", "evaluation"))
    refit: RefitConfig = section(RefitConfig, resume=IGNORE, rollouts=False, read_for=("generation", "evaluation"))
    memory: MemoryConfig = section(MemoryConfig, resume=IGNORE, rollouts=False)
    mismatch: MismatchConfig = section(MismatchConfig, resume=REFUSE, read_for=("policy",))
    reward: RewardConfig = section(RewardConfig, resume=REFUSE, read_for=("samples",))
    environment: EnvironmentConfig = section(EnvironmentConfig, resume=REFUSE, read_for=("trajectories",))
    data: DataConfig = section(DataConfig, resume=REFUSE)  # of paths only the content counts: data may move
    curriculum: CurriculumConfig = section(CurriculumConfig, resume=REFUSE, read_for=("trajectories",))
    ptx: PtxConfig = section(PtxConfig, resume=REFUSE, read_for=("ptx",))
    eval: EvalConfig = section(EvalConfig, resume=REPORT, rollouts=False, read_for=("evaluation",))
    checkpoint: CheckpointConfig = section(CheckpointConfig, resume=REPORT, rollouts=False)
    logging: LoggingConfig = section(LoggingConfig, resume=REPORT, rollouts=False)
    cluster: ClusterConfig = section(ClusterConfig, resume=IGNORE, rollouts=False)
    debug: DebugConfig = section(DebugConfig, resume=IGNORE, rollouts=False)

    RULES = rules("""
engine.can.replays !debug.train_only !engine.answers => debug.train_only
    | a recorded rollout, or a folder of them, with engine.name=recorded (or engine.answers)
!engine.can.replays or debug.train_only => engine.answers =
    | but with engine.name=recorded, and with debug.train_only
engine.can.replays => debug.record_answers =false | with engine.name=recorded
""")

    def __post_init__(self) -> None:
        if self.debug.train_only:
            self.engine = replace(self.engine, name="recorded", cuda_graphs=False)
        super().__post_init__()
        settle(self)
        if self.mismatch.expect == "zero" and self.model.kernels == "auto":
            self.model.kernels = "invariant"
        preference = self.algorithm.preference
        if preference.reference == "auto":  # adapters that are left out cannot follow the policy
            preference.reference = "adapter" if self.model.lora.rank and not preference.sync_every else "model"
