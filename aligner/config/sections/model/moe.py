"""Mixture-of-experts layers: `model.moe.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, Section, key
from aligner.errors import ConfigError
from aligner.families import FAMILIES


@dataclass
class MoeConfig(Section, key="model.moe"):
    """A layer's MLP is `num_experts` gated MLPs, of which a router picks `top_k` for each token."""

    num_experts: int = key(0, "Experts of a layer. 0: dense.", least=0)
    top_k: int = key(2, "Experts of a token.", least=1)
    ffn_hidden_size: int = key(0, "Width of one expert. 0: model.ffn_hidden_size.", least=0)
    norm_topk_prob: bool = key(True, "Let the weights of a token's experts sum to 1.")
    aux_coef: float = key(0.0, "Factor of the load-balancing loss.", least=0, resume=REFUSE)
    aux_over: str = key(
        "minibatch",
        "Tokens whose load that loss balances: of a minibatch (an extra forward pass) or a micro-batch.",
        choices=("minibatch", "micro_batch"),
        resume=REFUSE,
    )
    shared_ffn_hidden_size: int = key(
        0, "Width of one more MLP, which computes every token of such a layer. 0: none.", least=0
    )
    groups: int = key(1, "Equal groups of experts, of which a token's come from some.", least=1)
    top_groups: int = key(
        1, "Number of groups for a token: those with the largest sums of their two best scores.", least=1
    )
    scale: float = key(1.0, "Factor of the weights of a token's experts.", above=0)
    dense_layers: list[int] = key([], "Layers, counted from 0, with one MLP of model.ffn_hidden_size instead.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts and self.top_k > self.num_experts:
            expected = f"at most model.moe.num_experts={self.num_experts}"
            raise ConfigError("model.moe.top_k", self.top_k, expected)


def check_moe_family(family: str, moe: MoeConfig) -> None:
    traits = FAMILIES[family]
    if traits.moe and not moe.num_experts:
        raise ConfigError("model.moe.num_experts", 0, f"at least 1 with model.family={family}")
    if moe.num_experts and not traits.moe:
        having = ", ".join(name for name, other in FAMILIES.items() if other.moe)
        expected = f"one of {having} with model.moe.num_experts={moe.num_experts}"
        raise ConfigError("model.family", family, expected)
    if traits.moe and not (traits.moe.norm_topk_prob or moe.norm_topk_prob):
        raise ConfigError("model.moe.norm_topk_prob", False, f"true for model.family={family}")
    if traits.shared_gate and not moe.shared_ffn_hidden_size:
        raise ConfigError("model.moe.shared_ffn_hidden_size", 0, f"at least 1 with model.family={family}")
    if traits.sigmoid_router:
        _check_groups(family, moe)


def _check_groups(family: str, moe: MoeConfig) -> None:
    if moe.num_experts % moe.groups or moe.num_experts // moe.groups < 2:
        expected = f"a multiple of model.moe.groups={moe.groups}, at least 2 in each"
        raise ConfigError("model.moe.num_experts", moe.num_experts, expected)
    if moe.top_groups > moe.groups:
        raise ConfigError("model.moe.top_groups", moe.top_groups, f"at most model.moe.groups={moe.groups}")
    if moe.top_k > moe.num_experts // moe.groups * moe.top_groups:
        raise ConfigError("model.moe.top_k", moe.top_k, f"at most the experts of {moe.top_groups} groups")
    if not moe.ffn_hidden_size:
        raise ConfigError("model.moe.ffn_hidden_size", 0, f"at least 1 for model.family={family}")
    if not moe.shared_ffn_hidden_size or moe.shared_ffn_hidden_size % moe.ffn_hidden_size:
        expected = f"a multiple of model.moe.ffn_hidden_size={moe.ffn_hidden_size} for model.family={family}"
        raise ConfigError("model.moe.shared_ffn_hidden_size", moe.shared_ffn_hidden_size, expected)
    if moe.dense_layers != list(range(len(moe.dense_layers))):
        raise ConfigError("model.moe.dense_layers", moe.dense_layers, f"the first layers for model.family={family}")


def check_dense_layers(moe: MoeConfig, layers: int) -> None:
    dense = moe.dense_layers
    if dense and (sorted(set(dense)) != dense or dense[0] < 0 or dense[-1] >= layers or len(dense) == layers):
        expected = f"some of the layers 0 to {layers - 1}, ascending, and not all"
        raise ConfigError("model.moe.dense_layers", dense, expected)
