"""From an engine's columns to samples, and from samples to the rollout batch of a data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.ops.packing.routing import widened
from aligner.ops.packing.rows import joined
from aligner.types import STOP, Generations, RolloutBatch, Sample


def join_generations(parts: Sequence[Generations]) -> Generations:
    """Join the rows of several ranks, in rank order. All must have the same weight version."""
    versions = {generations.weight_version for generations in parts}
    assert len(versions) == 1, f"samples of several weight versions in one rollout: {sorted(versions)}"
    return joined(parts)


def collate(samples: list[Sample], generations: Generations, slots: Tensor, pad_id: int) -> RolloutBatch:
    """Return B samples as right-padded rows [B, T]. `slots` int64 [B]: the global prompt slot of each sample.

    Rewards are NaN and every sample invalid until they are scored.
    """
    count, width = generations.tokens.shape
    prompt_lengths = torch.tensor([len(s.prompt.tokens) for s in samples])
    lengths = prompt_lengths + generations.lengths
    total = int(lengths.max())
    column = torch.arange(total)[None]
    tokens = torch.full((count, total), pad_id, dtype=torch.int64)
    prompt_mask = column < prompt_lengths[:, None]
    tokens[prompt_mask] = torch.tensor([t for s in samples for t in s.prompt.tokens])
    response_mask = (column >= prompt_lengths[:, None]) & (column < lengths[:, None])
    filled = torch.arange(width)[None] < generations.lengths[:, None]
    tokens[response_mask] = generations.tokens[filled]

    def placed(source: Tensor) -> Tensor:
        result = torch.zeros(count, total)
        result[response_mask] = source[filled].float()
        return result

    made, forks = generations.made, generations.forks

    # engine and trainer are compared on the distribution the trainer can compute: the full tempered one
    sampled, full = generations.logprobs, generations.full_logprobs
    return RolloutBatch(
        tokens=tokens,
        lengths=lengths,
        response_mask=response_mask.float() if made is None else placed(made),
        rollout_logprobs=placed(sampled if full is None else full),
        rewards=torch.full((count,), float("nan")),
        valid=torch.zeros(count, dtype=torch.bool),
        group=slots,
        finished=generations.finish_reason == STOP,
        weight_version=generations.weight_version,
        samples=samples,
        sampled_logprobs=None if full is None else placed(sampled),
        routing=None if generations.routing is None else widened(generations.routing, total),
        forks=None if forks is None else placed(forks).long(),
        versions=None if generations.versions is None else placed(generations.versions).long(),
    )
