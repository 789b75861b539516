"""Mixture-of-experts layers: `model.moe.*`."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from aligner.config.key import REFUSE, Section, key
from aligner.config.rule import rules
from aligner.errors import ConfigError


@dataclass
class MoeConfig(Section, key="model.moe"):
    """Keys of experts. A layer's MLP is `num_experts` gated MLPs, of which a router picks `top_k` for each token."""

    num_experts: int = key(0, "Experts per layer. 0: dense.", least=0)
    top_k: int = key(2, "Experts per token.", least=1)
    ffn_hidden_size: int = key(0, "Width of one expert. 0: model.ffn_hidden_size.", least=0)
    norm_topk_prob: bool = key(True, "Normalise the weights of a token's experts to sum 1.")
    shared_ffn_hidden_size: int = key(
        0, "Width of an additional MLP for every token of such a layer. 0: none.", least=0
    )
    latent_size: int = key(
        0,
        "Width of the experts' inputs and outputs; two matrices convert from model.hidden_size and back. 0: none do.",
        least=0,
    )
    groups: int = key(1, "Number of equal groups of experts. A token uses `top_groups` of them.", least=1)
    top_groups: int = key(
        1, "Number of groups per token: those with the largest sums of their two best scores.", least=1
    )
    scale: float = key(1.0, "Factor of the weights of a token's experts.", above=0)
    hash_layers: int = key(0, "First layers, in which a table chooses the experts of each token id.", least=0)
    gate_limit: float = key(
        0.0, "Greatest value of gates, and greatest size of what they multiply, in these MLPs. 0: none.", least=0
    )
    dense_layers: list[int] = key([], "Layers, counted from 0, with one MLP of model.ffn_hidden_size instead.")
    aux_coef: float = key(0.0, "Factor of the load-balancing loss.", least=0, resume=REFUSE)
    aux_over: str = key(
        "minibatch",
        "Tokens whose load aux_coef balances: of a minibatch (an extra forward pass), its micro-batches so far, one.",
        choices=("minibatch", "running", "micro_batch"),
        resume=REFUSE,
    )

    RULES = rules("num_experts => top_k <=num_experts")

    @property
    def of_group(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.groups

    @property
    def reachable(self) -> int:
        """Experts of the groups that a token has."""
        return self.of_group * self.top_groups

    def reached(self, parts: float) -> float:
        """Return how many of so many equal parts of the experts have one of a token's, if all are chosen as often."""
        others = self.num_experts - int(self.num_experts / parts)
        return parts * (1 - comb(others, self.top_k) / comb(self.num_experts, self.top_k))

    @property
    def dense_first(self) -> bool:
        return self.dense_layers == list(range(len(self.dense_layers)))


def check_dense_layers(moe: MoeConfig, layers: int) -> None:
    dense = moe.dense_layers
    if dense and (sorted(set(dense)) != dense or dense[0] < 0 or dense[-1] >= layers or len(dense) == layers):
        expected = f"some of the layers 0 to {layers - 1}, ascending, and not all"
        raise ConfigError("model.moe.dense_layers", dense, expected)
