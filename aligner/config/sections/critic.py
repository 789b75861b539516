"""The section `critic`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import at_least, one_of
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig


@dataclass
class CriticConfig:
    init: str = ""  # empty: the reward model (reward.model)
    # own: all weights are the critic's, from critic.init; policy: with model.lora, the policy's frozen ones, beside
    # adapters and a score head of the critic's
    trunk: str = "own"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    warmup_steps: int = 0  # rollouts in which only the critic learns
    pretrain_steps: int = 0  # optimizer steps on the first rollout, towards its returns with lambda 1, before any other
    clip: float = 0.2  # of values around the old ones; 0: off

    def __post_init__(self) -> None:
        one_of("critic.trunk", self.trunk, ("own", "policy"))
        at_least("critic.pretrain_steps", self.pretrain_steps, 0)
        at_least("critic.warmup_steps", self.warmup_steps, 0)
        at_least("critic.clip", self.clip, 0)
