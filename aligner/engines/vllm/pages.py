"""How vLLM cuts its cache. Its pages are of one size, a row's state of a linear layer fills one, and layers share a
page's number in groups of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from aligner.config.sections.model.config import ModelConfig
from aligner.families.draft_folder import EagleHead


def _numbers(model: ModelConfig, ranks: int) -> int:
    """Return the numbers of a token in a layer's cache: of the layer with the most."""
    latent, attention = model.latent, model.attention
    if latent.kv_rank:
        return latent.kv_rank + latent.rotary_dim  # on each rank
    heads = attention.global_kv_heads or model.num_kv_heads
    kinds = ((model.num_kv_heads, model.kv_channels), (heads, attention.global_head_dim))
    return max(2 * max(1, heads // ranks) * width for heads, width in kinds)


def _drafted(drafter: ModelConfig | EagleHead | None, ranks: int) -> int:
    """Return the numbers of a token in all layers of what drafts beside the model."""
    if isinstance(drafter, EagleHead):
        return drafter.num_layers * max(1, drafter.num_kv_heads // ranks) * drafter.head_numbers
    return 0 if drafter is None else drafter.num_layers * _numbers(drafter, ranks)


def _indexed(model: ModelConfig) -> int:
    """Return the bytes of a token in the caches of all indexers: a key in float8, and a scale of each 128 numbers."""
    width = model.indexer.head_dim
    return len(model.layers_of("indexer")) * (width + width // 128 * 4)


@dataclass(frozen=True)
class Pages:
    tokens: int  # of a page
    bytes: int  # of a page in all layers of a group
    groups: int  # of layers with attention, each with pages of its own for a row's tokens
    kept: int  # pages of a row of any length, and one that vLLM keeps for itself

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        dtype: torch.dtype,
        ranks: int,
        block: int,
        states: int,
        drafter: ModelConfig | EagleHead | None = None,
        drafts: int = 0,
    ) -> Pages:
        """Return the pages of one of `ranks`. Without linear layers they have `block` tokens, with them the smallest
        multiple that holds a state. `states`: of a row, in each linear layer, beside one for each of its `drafts`.
        `drafter`: as in `vllm_drafter`, whose layers are in the same pages."""
        token = dtype.itemsize * _numbers(model, ranks)
        linear, layers, others = model.linear, len(model.layers_of("linear")), len(model.layers_of("attention"))
        others += model.mtp.layers
        if not layers:
            drafted = dtype.itemsize * _drafted(drafter, ranks)
            return cls(block, block * (others * token + _indexed(model) + drafted), 1, 1)
        state = 4 * linear.value_heads * linear.value_head_dim * linear.key_head_dim
        state += dtype.itemsize * (linear.conv - 1 + drafts) * linear.key_heads * linear.mixed_width
        tokens = block * ceil(state / ranks / (block * token))
        most, least = max(layers, others), min(layers, others)
        group = most if most < 1.5 * least else least
        groups = ceil(others / group)
        return cls(tokens, group * tokens * token, groups, 1 + (states + drafts) * ceil(layers / group))
