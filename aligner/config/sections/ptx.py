"""The section `ptx`: likelihood of other rows in the policy's own optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import at_least
from aligner.config.sections.data import DataConfig
from aligner.errors import ConfigError


@dataclass
class PtxConfig:
    coef: float = 0.0  # of the mean negative log-likelihood of ptx.data, added to the stage's loss; 0: off
    sequences: int = 8  # rows of ptx.data in each optimizer step, over all ranks
    data: DataConfig = field(default_factory=DataConfig)  # a stream of its own, of rows as stage sft takes them

    def __post_init__(self) -> None:
        at_least("ptx.coef", self.coef, 0)
        at_least("ptx.sequences", self.sequences, 1)
        if self.coef and not (self.data.train or self.data.sources):
            raise ConfigError("ptx.data.train", "", "a file or folder with rows to learn with ptx.coef > 0")
        if self.data.eval:
            raise ConfigError("ptx.data.eval", self.data.eval, "empty: data.eval is what is evaluated")
        for name in ("chat_template", "template_arguments"):
            if getattr(self.data, name) != getattr(DataConfig(), name):
                expected = f"as it is by default: data.{name} is the policy's"
                raise ConfigError(f"ptx.data.{name}", getattr(self.data, name), expected)
