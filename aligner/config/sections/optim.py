"""The sections `optim` and `critic.optim`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import above, at_least, one_of, within
from aligner.errors import ConfigError


@dataclass
class OptimConfig:
    lr: float = 1e-4  # peak learning rate
    min_lr: float = 0.0  # at the end of the decay
    schedule: str = "constant"  # constant, linear, cosine
    warmup_steps: int = 0  # linear, from 0
    decay_from: float = 0.0  # constant until this fraction of the steps, then the schedule's decay
    weight_decay: float = 0.01  # of AdamW; not of norms and biases
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    eps: float = 1e-8  # of AdamW
    clip_grad: float = 1.0  # 0: off
    distributed: bool = True  # shard optimizer state over data-parallel ranks

    def __post_init__(self) -> None:
        above("optim.lr", self.lr, 0)
        within("optim.min_lr", self.min_lr, 0, self.lr)
        one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        within("optim.decay_from", self.decay_from, 0, 1)
        at_least("optim.weight_decay", self.weight_decay, 0)
        above("optim.eps", self.eps, 0)
        at_least("optim.clip_grad", self.clip_grad, 0)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError("optim.betas", list(self.betas), "two numbers in [0, 1)")
