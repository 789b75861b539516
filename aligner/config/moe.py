"""Mixture-of-experts layers: `model.moe.*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import at_least, one_of
from aligner.config.families import MOE_FAMILIES
from aligner.errors import ConfigError

ALWAYS_NORMALISED = ("mixtral", "gpt_oss")


@dataclass
class MoeConfig:
    """A layer's MLP is `num_experts` gated MLPs, of which a router picks `top_k` for each token."""

    num_experts: int = 0  # 0: dense
    top_k: int = 2  # experts of a token
    ffn_hidden_size: int = 0  # of one expert; 0: model.ffn_hidden_size
    norm_topk_prob: bool = True  # the weights of a token's experts sum to 1
    aux_coef: float = 0.0  # of the load-balancing loss
    aux_over: str = "minibatch"  # tokens whose load it balances: minibatch (an extra forward pass), micro_batch
    dense_layers: list[int] = field(default_factory=list)  # from 0, with one MLP of model.ffn_hidden_size instead

    def __post_init__(self) -> None:
        for key, low in (("num_experts", 0), ("top_k", 1), ("ffn_hidden_size", 0), ("aux_coef", 0)):
            at_least(f"model.moe.{key}", getattr(self, key), low)
        one_of("model.moe.aux_over", self.aux_over, ("minibatch", "micro_batch"))
        if self.num_experts and self.top_k > self.num_experts:
            expected = f"at most model.moe.num_experts={self.num_experts}"
            raise ConfigError("model.moe.top_k", self.top_k, expected)


def check_moe_family(family: str, moe: MoeConfig) -> None:
    if family in MOE_FAMILIES and not moe.num_experts:
        raise ConfigError("model.moe.num_experts", 0, f"at least 1 with model.family={family}")
    if moe.num_experts and family not in MOE_FAMILIES:
        expected = f"one of {', '.join(MOE_FAMILIES)} with model.moe.num_experts={moe.num_experts}"
        raise ConfigError("model.family", family, expected)
    if family in ALWAYS_NORMALISED and not moe.norm_topk_prob:
        raise ConfigError("model.moe.norm_topk_prob", False, f"true for model.family={family}")


def check_dense_layers(moe: MoeConfig, layers: int) -> None:
    dense = moe.dense_layers
    if dense and (sorted(set(dense)) != dense or dense[0] < 0 or dense[-1] >= layers or len(dense) == layers):
        expected = f"some of the layers 0 to {layers - 1}, ascending, and not all"
        raise ConfigError("model.moe.dense_layers", dense, expected)
