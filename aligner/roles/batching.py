"""From rows to micro-batches: by count or by a budget of padded tokens; and forward passes that keep the row order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aligner.config.schema import BatchConfig
from aligner.megatron.train import ShardedModel
from aligner.types import RolloutBatch, TrainBatch


def rows_by_tokens(lengths: Tensor, budget: int, unit: int = 1) -> list[Tensor]:
    """Split rows into micro-batches of at most `budget` padded tokens (rows x longest row), longest first.

    lengths int64 [B]. `unit` consecutive rows (the two of a preference pair) stay together. A unit longer than the
    budget is a micro-batch of its own. Returns row indices; every row exactly once.
    """
    longest = lengths.view(-1, unit).amax(1)
    order = torch.argsort(longest, descending=True, stable=True)
    widths = longest[order].tolist()
    parts, start = [], 0
    for i, _ in enumerate(widths):
        if i > start and (i + 1 - start) * unit * widths[start] > budget:
            parts.append(order[start:i])
            start = i
    parts.append(order[start:])
    offsets = torch.arange(unit)
    return [(part[:, None] * unit + offsets).reshape(-1) for part in parts]


def micro_batches(minibatch: TrainBatch, batch: BatchConfig, unit: int = 1) -> list[TrainBatch]:
    """The micro-batches of this rank's rows, by `batch.micro_batch_tokens` if set, else `batch.micro_batch_samples`
    units.

    Data-parallel ranks may end up with different numbers of micro-batches: gradients are reduced once, at the end.
    """
    if batch.micro_batch_tokens:
        parts = rows_by_tokens(minibatch.lengths, batch.micro_batch_tokens, unit)
    else:
        parts = list(torch.arange(len(minibatch.lengths)).split(batch.micro_batch_samples * unit))
    return [minibatch.select(rows) for rows in parts]


def forward_rows(
    model: ShardedModel,
    rows: RolloutBatch | TrainBatch,
    budget: int,
    read: Callable[[Tensor, TrainBatch], Tensor],
    columns: int = 0,
) -> Tensor:
    """`read(head output, micro-batch) -> [b, t]` over all rows without gradient, back in row order as float32 [B,
    T] ([B, columns] if told), the columns a micro-batch lacks being 0.

    Every pipeline stage gets the result. Data-parallel ranks may pass different numbers of rows, also none.
    """
    count, width = len(rows.tokens), columns or rows.tokens.shape[1]
    if not count:
        return torch.zeros(0, width)
    parts = rows_by_tokens(rows.lengths, budget)
    batch = TrainBatch(tokens=rows.tokens, lengths=rows.lengths, loss_mask=torch.zeros(count, 0))
    outputs = model.forward([batch.select(part) for part in parts], read)
    result = torch.zeros(count, width, dtype=torch.float32, device=model.device)
    for part, output in zip(parts, outputs, strict=False):
        cut = min(output.shape[1], width)
        result[part.to(model.device), :cut] = output[:, :cut].float()
    return model.broadcast_from_last_stage(result).cpu()
