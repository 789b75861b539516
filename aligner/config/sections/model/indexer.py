"""Attention to the tokens that an indexer chooses (DeepSeek Sparse Attention, arXiv:2512.02556, section 2.1):
`model.indexer.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, Section, key
from aligner.config.rule import rules
from aligner.errors import ConfigError


@dataclass
class IndexerConfig(Section, key="model.indexer"):
    """Keys of indexers. For each token a layer's indexer scores the tokens up to it, and attention sees the `top_k`
    that score highest."""

    heads: int = key(0, "Heads that score. 0: no indexer; attention sees every token.", least=0)
    head_dim: int = key(0, "Width of such a head.", least=0)
    top_k: int = key(0, "Tokens that attention sees.", least=0)
    shared_layers: list[int] = key([], "Layers, counted from 0, that use the choice of the layer before them.")
    loss: float = key(
        0.0,
        "Factor of the loss that trains indexers: how far their scores are from what attention weighs, of the chosen "
        "tokens. 0: their weights stay as they are.",
        least=0,
        resume=REFUSE,
    )

    RULES = rules("heads => head_dim, top_k >=1")

    def is_full(self, layer: int) -> bool:
        """Return whether layer 0, 1, ... has an indexer of its own."""
        return self.heads > 0 and layer not in self.shared_layers

    def is_followed(self, layer: int) -> bool:
        """Return whether the layer behind it uses its choice."""
        return layer + 1 in self.shared_layers


def check_indexer(indexer: IndexerConfig, layers: int) -> None:
    shared = indexer.shared_layers
    if shared and (sorted(set(shared)) != shared or shared[0] < 1 or shared[-1] >= layers):
        raise ConfigError("model.indexer.shared_layers", shared, f"some of the layers 1 to {layers - 1}, ascending")
