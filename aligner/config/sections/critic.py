"""The section `critic` (stage ppo)."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import IGNORE, REPORT, Section, key, section
from aligner.config.sections.optim import OptimConfig


@dataclass
class CriticConfig(Section, key="critic"):
    init: str = key("", "Folder of the critic's initial weights. Empty: reward.model.", resume=IGNORE)
    trunk: str = key(
        "own",
        "Weights below the critic's score head. own: its own, from critic.init; policy: the policy's frozen weights "
        "(model.lora), with the critic's own adapters.",
        choices=("own", "policy"),
    )
    optim: OptimConfig = section(OptimConfig, like="optim", read_for=("critic",), resume=REPORT)
    warmup_steps: int = key(0, "Number of first rollouts in which only the critic learns.", least=0)
    pretrain_steps: int = key(
        0, "Optimizer steps of the critic on the first rollout, on its returns with lambda 1.", least=0
    )
    clip: float = key(0.2, "Largest change of a value from the old one. 0: no limit.", least=0)
