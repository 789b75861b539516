"""Low-rank adapters: `model.lora.*`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from aligner.config.checks import different
from aligner.config.key import REFUSE, Section, key
from aligner.config.rule import rules

ALL_LINEAR = "all-linear"
USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoraConfig(Section, key="model.lora"):
    """Keys of adapters: instead of W two small matrices learn, y = W x + scale B A x (docs/how-to/adapters.md)."""

    rank: int = key(0, "Rows of A and columns of B. 0: train all weights, without adapters.", least=0)
    alpha: float = key(32.0, "Numerator of the scale, alpha / rank.", above=0)
    dropout: float = key(0.0, "Dropout of the adapters' input in training.", least=0, most=0.99, resume=REFUSE)
    targets: list[str] = key(
        [*USUAL],
        "Matrices by their names in Hugging Face's files. [all-linear]: all of the layers except routers.",
        valid=(partial(different, alone=ALL_LINEAR), f"{ALL_LINEAR} alone, or names of matrices, each once, as q_proj"),
    )
    rslora: bool = key(False, "Scale by alpha / sqrt(rank) (arXiv:2312.03732).")
    quantize_base: str = key(
        "none",
        "Data type of the layers' frozen matrices, in fewer bits (QLoRA, arXiv:2305.14314).",
        choices=("none", "int8", "fp8", "nf4"),
    )
    init: str = key("", "Folder of a `peft` adapter to start from. Empty: an adapter that changes nothing.")
    dora: bool = key(
        False, "Train also the norm of each row of the matrix, separately from its direction (arXiv:2402.09353)."
    )

    RULES = rules("""
!rank => quantize_base =none | with model.lora.rank=0, which trains all weights
!rank => init = | with model.lora.rank=0: set rank, alpha and targets too
""")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
