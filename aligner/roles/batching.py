"""Micro-batches of rows, by count or by a budget of tokens; and forward passes that keep the row order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.batch import BatchConfig
from aligner.megatron.train import ShardedModel
from aligner.ops.packing.balance import deal
from aligner.ops.packing.documents import split_documents, split_forks
from aligner.ops.reduce import max_over
from aligner.types import RolloutBatch, ScalarMetrics, TrainBatch


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
    return [(units[:, None] * unit + offsets).reshape(-1) for units in parts]


def packed_rows(lengths: Tensor, budget: int, unit: int = 1, at_least: int = 1) -> list[Tensor]:
    """Split rows into the fewest micro-batches (but `at_least` that many) of at most `budget` tokens each, of equal
    numbers of units and nearly equal tokens. A unit longer than the budget counts as one that fills it.

    Same arguments and result as `rows_by_tokens`.
    """
    tokens = lengths.view(-1, unit).sum(1)
    costs = tokens.double().tolist()
    limit = max(budget, int(tokens.max()))
    parts = max(at_least, -(-int(tokens.sum()) // limit))
    while True:
        dealt = deal(costs, min(parts, len(costs)))
        if parts >= len(costs) or max(sum(costs[i] for i in rows) for rows in dealt) <= limit:
            break
        parts += 1
    offsets = torch.arange(unit)
    return [(torch.tensor(rows)[:, None] * unit + offsets).reshape(-1) for rows in dealt]


def split(lengths: Tensor, batch: BatchConfig, budget: int, unit: int = 1, at_least: int = 1) -> list[Tensor]:
    """Return the rows of each micro-batch of at most `budget` tokens, padded or packed by `batch.packing`."""
    if batch.packing:
        return packed_rows(lengths, budget, unit, at_least)
    return rows_by_tokens(lengths, budget, unit)


def micro_batches(
    minibatch: TrainBatch, batch: BatchConfig, unit: int = 1, group: dist.ProcessGroup | None = None
) -> list[TrainBatch]:
    """Return the micro-batches of this rank's rows, by `batch.micro_batch_tokens` if set, else
    `batch.micro_batch_samples` units. With packing, the data-parallel ranks of `group` get equally many. Documents,
    and forks, become rows."""
    if not batch.micro_batch_tokens:
        parts = list(torch.arange(len(minibatch.lengths)).split(batch.micro_batch_rows * unit))
    else:
        parts = split(minibatch.lengths, batch, batch.micro_batch_tokens, unit)
        if batch.packing and group is not None and group.size() > 1:
            most = int(max_over(torch.tensor(len(parts)), group))
            if most > len(parts):
                parts = split(minibatch.lengths, batch, batch.micro_batch_tokens, unit, at_least=most)
    chosen = [minibatch.select(rows) for rows in parts]
    return [split_documents(rows) if rows.forks is None else split_forks(rows, rows.loss_mask) for rows in chosen]


def batch_metrics(parts: list[TrainBatch], batch: BatchConfig, context: int) -> ScalarMetrics:
    """Return numbers of this rank's micro-batches: how many, their mean rows and tokens, the share of their tokens that
    are padding, and the share of `batch.micro_batch_tokens` that they fill."""
    real = sum(int(micro_batch.lengths.sum()) for micro_batch in parts)
    chunks = 2 * context if context > 1 else 1  # equal ones, of each packed row
    padded = sum(
        int((-(-rows.lengths // chunks) * chunks).sum())
        if batch.packing
        else len(rows.lengths) * int(rows.lengths.max())
        for rows in parts
    )
    budget = batch.micro_batch_tokens
    filled = {"batch/packing_efficiency": (real if batch.packing else padded) / (len(parts) * budget)} if budget else {}
    return filled | {
        "batch/micro_batches": float(len(parts)),
        "batch/micro_batch_rows": sum(len(micro_batch.lengths) for micro_batch in parts) / len(parts),
        "batch/micro_batch_tokens": real / len(parts),
        "batch/padding_fraction": 1 - real / padded,
    }


def no_rows() -> TrainBatch:
    """Return an empty batch for a rank without rows that takes part in a pass as others exchange tokens with it."""
    return TrainBatch(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0), torch.zeros(0, 1))


def forward_rows(
    model: ShardedModel,
    rows: RolloutBatch | TrainBatch,
    batch: BatchConfig,
    read: Callable[[Tensor, TrainBatch], Tensor],
    columns: int = 0,
    wanted: Tensor | None = None,
    routing: Tensor | None = None,
    unit: int = 1,
    beyond: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return `read(head output, micro-batch) -> [b, t]` over all rows without gradient, in row order as `dtype` [B,
    T] ([B, columns] if set). Columns that a micro-batch lacks are 0. With `beyond`, `read` gives [b, t, *beyond].

    `wanted`, `routing`: see TrainBatch. `unit` consecutive rows stay in one micro-batch. Every rank that shares the
    rows gets the result. Data-parallel ranks may pass different numbers of rows, also none; if the model `exchanges`,
    all of them call this.
    """
    count, width = len(rows.tokens), columns or rows.tokens.shape[1]
    if not count:
        if model.exchanges:
            model.forward([], read)
        return torch.zeros(0, width, *beyond, dtype=dtype)
    parts = split(rows.lengths, batch, batch.logprob_budget, unit)
    none = torch.zeros(count, 0)
    all_rows = TrainBatch(rows.tokens, rows.lengths, loss_mask=none, wanted=wanted, routing=routing)
    outputs = model.forward([all_rows.select(indices) for indices in parts], read)
    result, done = torch.zeros(count, width, *beyond, dtype=dtype, device=model.device), 0
    for output in outputs:  # in the order of the micro-batches: where rows belong is known on the host
        cut = min(output.shape[1], width)
        result[done : done + len(output), :cut] = output[:, :cut]
        done += len(output)
    result = model.broadcast_from_last_stage(result).cpu()
    return torch.empty_like(result).index_copy_(0, torch.cat(parts), result)
