"""Leave out what nobody reads: logits that no loss uses, and parts of the last layer.

In the last layer, for the tokens of a row before the first and after the last one that is read (a prompt; for a
reward model all but the last token), everything after the product that makes queries, keys and values is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from aligner.ops.packing.pack import SMALL_MASK, Final, Packing, Segment, assign_cells, length_classes
from aligner.ops.packing.ragged import in_rows

LAST_LAYER_MASK = 1 << 26  # cells of a segment's mask: beyond, the last layer computes every token
WORTH = 0.9  # if a larger share of the tokens is read, the last layer computes every token


def any_count(count: int) -> int:
    return 1


def predicting(mask: Tensor) -> Tensor:
    """Return bool [B, T]: the tokens before those of mask [B, T], which predict them."""
    return torch.nn.functional.pad(mask[:, 1:] > 0, (0, 1))


def last_tokens(lengths: Tensor, width: int) -> Tensor:
    """Return bool [B, width]: the last token of each row."""
    return torch.arange(width) == lengths[:, None] - 1


def without_unread(packing: Packing, wanted: Tensor, step: Callable[[int], int] = any_count) -> Packing:
    """Return the same stream without the pairs of tokens that are not `wanted`: bool [B, T], True where a token's
    output is read. If none is wanted, one pair stays, so that a loss has a graph. The first is repeated, for nobody,
    until their count n is a multiple of `step(n)`."""
    count = len(packing.targets)
    keep = torch.zeros(count + 1, dtype=torch.bool)
    keep[packing.predicted[1:][wanted.flatten()[:-1]]] = True  # a cell's pair is computed at the cell before it
    keep = keep[:count]
    keep[0] |= ~keep.any()
    pairs = keep.nonzero().flatten()
    pairs = torch.cat([pairs, pairs[:1].expand(-len(pairs) % step(len(pairs)))])
    return replace(
        packing,
        outputs=pairs if packing.outputs is None else packing.outputs[pairs],
        targets=packing.targets[pairs],
        predicted=_renumber(packing.predicted, keep, len(pairs)),
    )


def _renumber(grid: Tensor, keep: Tensor, size: int) -> Tensor:
    """Convert a grid over n rows to one over those that are kept (bool [n]) in `size` rows."""
    count = torch.tensor([size])
    return torch.cat([(keep.cumsum(0) - 1).where(keep, count), count])[grid]


def narrowed(packing: Packing, wanted: Tensor, step: Callable[[int], int] = any_count) -> Packing:
    """Add a `Final` to the result of `without_unread`: the tokens of each row from the first wanted one to the last
    one. Some rows add tokens before them, so that their count n is a multiple of `step(n)`, if there are enough. It
    is left out where it would save little. Only for whole rows: without context parallelism."""
    size, own = packing.tokens, packing.lengths
    read = torch.zeros(size + 1, dtype=torch.bool)
    read[packing.here[wanted.flatten()]] = True
    read = read[:size]
    read[0] |= ~read.any()
    row, position = torch.repeat_interleave(own), torch.arange(size)
    first = torch.full_like(own, size).scatter_reduce(0, row, position.where(read, size), "amin")
    last = torch.full_like(own, -1).scatter_reduce(0, row, position.where(read, -1), "amax")
    room = (first - own.cumsum(0) + own).where(last >= first, 0)
    read_count = int((last - first + 1).clamp_min(0).sum())
    lacking = -read_count % step(read_count)
    if lacking <= int(room.sum()):
        first = first - (lacking - room.cumsum(0) + room).clamp_min(0).minimum(room)
    keep = (position >= first[row]) & (position <= last[row])
    if int(keep.sum()) > WORTH * size:
        return packing
    kept, number = keep.nonzero().flatten(), keep.cumsum(0) - 1
    cells = packing.here.view(packing.rows, packing.width)
    some = (last >= first).nonzero().flatten()
    segments, q_index, out_index, done = [], [], torch.empty_like(kept), 0
    count, starts = last - first + 1, packing.positions[first.clamp_max(size - 1)]
    for inside in length_classes(count[some], (starts + count)[some]):
        rows = some[inside]
        begin, queries, start = first[rows], count[rows], starts[rows]
        q_width, k_width = int(queries.max()), int((start + queries).max())
        mask_cells = len(rows) * q_width * k_width
        alike = int(queries.min()) == q_width and int(start.min()) == int(start.max())
        masked = packing.ragged is None and not (alike and mask_cells > SMALL_MASK)
        if masked and mask_cells > LAST_LAYER_MASK:
            return packing
        query, key = torch.arange(q_width).expand(len(rows), q_width), torch.arange(k_width)
        real = query < queries[:, None]
        index = assign_cells(out_index, number[begin, None] + query.where(real, 0), real, done)
        keys = cells[rows, :k_width]
        keys = keys.where(keys < size, begin[:, None]).flatten()  # past a row's end, which no query sees
        seen = key <= (start[:, None] + query)[:, None, :, None] if masked else None
        segments.append(Segment(len(rows), q_width, k_width, keys, seen, start))
        q_index.append(index)
        done += len(index)
    final = Final(kept, segments, torch.cat(q_index), out_index)
    return replace(
        packing,
        here=_renumber(packing.here, keep, len(kept)),
        before=_renumber(packing.before, keep, len(kept)),
        outputs=number[packing.outputs].clamp_min(0),  # the one pair of a head that reads no pairs may not be kept
        final=final if packing.ragged is None else in_rows(final),
    )
