"""Low-rank adapters: `model.lora.*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import above, at_least, one_of, within
from aligner.errors import ConfigError

ALL_LINEAR = "all-linear"
USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoraConfig:
    """Instead of a matrix W two small ones are trained: y = W x + scale B A x (docs/lora.md)."""

    rank: int = 0  # rows of A and columns of B; 0: no adapters, all weights are trained
    alpha: float = 32.0  # the scale is alpha / rank
    dropout: float = 0.0  # of the adapters' input, while training
    # matrices by their names in Hugging Face's files; [all-linear]: all of the layers, but routers
    targets: list[str] = field(default_factory=lambda: list(USUAL))
    rslora: bool = False  # the scale is alpha / sqrt(rank) (arXiv:2312.03732)
    # hold the frozen matrices of the layers in fewer bits: none, int8, fp8, nf4 (QLoRA, arXiv:2305.14314)
    quantize_base: str = "none"
    init: str = ""  # start from the adapter in this folder, as `peft` writes it; empty: from one that changes nothing
    dora: bool = False  # also train the norm of each row of the matrix, apart from its direction (arXiv:2402.09353)

    def __post_init__(self) -> None:
        at_least("model.lora.rank", self.rank, 0)
        one_of("model.lora.quantize_base", self.quantize_base, ("none", "int8", "fp8", "nf4"))
        if self.quantize_base != "none" and not self.rank:
            expected = "none with model.lora.rank=0, which trains all weights"
            raise ConfigError("model.lora.quantize_base", self.quantize_base, expected)
        if self.init and not self.rank:
            raise ConfigError(
                "model.lora.init", self.init, "empty with model.lora.rank=0: set rank, alpha and targets too"
            )
        above("model.lora.alpha", self.alpha, 0)
        within("model.lora.dropout", self.dropout, 0, 0.99)
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError("model.lora.targets", list(self.targets), "names of matrices, each once, as q_proj")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ConfigError("model.lora.targets", list(self.targets), f"{ALL_LINEAR} alone, or names of matrices")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
