"""The section `ptx`: likelihood of other rows in the policy's own optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key, section
from aligner.config.rule import rules
from aligner.config.sections.data import DataConfig


@dataclass
class PtxConfig(Section, key="ptx"):
    coef: float = key(
        0.0, "Factor of the mean negative log-likelihood of ptx.data, added to the stage's loss. 0: off.", least=0
    )
    sequences: int = key(8, "Rows of ptx.data per optimizer step, over all ranks.", least=1)
    data: DataConfig = section(DataConfig, like="data", read_for=("ptx",))

    RULES = rules("""
coef !data.sources !data.train => data.train | a file or folder with rows to learn with ptx.coef > 0
=> data.eval = | : data.eval is what is evaluated
=> data.chat_template =auto | : data.chat_template is the policy's
=> data.template_arguments = | : data.template_arguments are the policy's
""")
