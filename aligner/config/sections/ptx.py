"""The section `ptx`: likelihood of other rows in the policy's own optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key, section
from aligner.config.sections.data import DataConfig
from aligner.errors import ConfigError


@dataclass
class PtxConfig(Section, key="ptx"):
    coef: float = key(
        0.0, "Factor of the mean negative log-likelihood of ptx.data, added to the stage's loss. 0: off.", least=0
    )
    sequences: int = key(8, "Rows of ptx.data in each optimizer step, over all ranks.", least=1)
    data: DataConfig = section(DataConfig, like="data", read_for=("ptx",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coef and not (self.data.train or self.data.sources):
            raise ConfigError("ptx.data.train", "", "a file or folder with rows to learn with ptx.coef > 0")
        if self.data.eval:
            raise ConfigError("ptx.data.eval", self.data.eval, "empty: data.eval is what is evaluated")
        for name in ("chat_template", "template_arguments"):
            if getattr(self.data, name) != getattr(DataConfig(), name):
                expected = f"as it is by default: data.{name} is the policy's"
                raise ConfigError(f"ptx.data.{name}", getattr(self.data, name), expected)
