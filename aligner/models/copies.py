"""Copies of the embedding and the output matrix that files of models with multi-token prediction have beside its
layer. Here they are the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from aligner.config.sections.model.config import ModelConfig


def copies(cfg: ModelConfig) -> dict[str, str]:
    """Return the name of each copy -> the tensor that it equals; empty where there are none."""
    if not cfg.mtp.layers or cfg.traits.ahead_apart:
        return {}
    at, embedding = f"model.layers.{cfg.num_layers}.", cfg.traits.table[0].hf[0]
    head = embedding if cfg.tie_embeddings else "lm_head.weight"
    return {f"{at}embed_tokens.weight": embedding, f"{at}shared_head.head.weight": head}


def with_copies(tensors: Iterable[tuple[str, Tensor]], cfg: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, and each copy behind the tensor that it equals."""
    every = copies(cfg)
    for name, tensor in tensors:
        yield name, tensor
        for copy, original in every.items():
            if original == name:
                yield copy, tensor
