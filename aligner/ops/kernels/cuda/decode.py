"""Attention of the new tokens of rows against the cache, as one kernel. Each row reads only its own positions.

Flash decoding (Dao et al. 2023): where rows and heads are too few to fill the GPU, several programs share a row's
positions, and a second kernel adds up their results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aligner.ops.kernels.scored_attention import ScoreRule

BLOCK, WARPS, STAGES = 64, 4, 2  # positions read at once, and what Triton makes of the loop
PROGRAMS = 512  # wanted at least: a few for each multiprocessor
LEAST = 256  # positions that are worth a program of their own


@triton.jit
def _attend(
    query,  # [n, heads, d]
    key,  # [pages, kv_heads, page, d]
    value,  # [pages, kv_heads, page, e]
    positions,  # [n], of the new tokens
    table,  # [n, pages of a row]
    sinks,  # [heads]
    out,  # [n, heads, e]; with several parts float32 [n, heads, parts, e], not divided by `sums`
    tops,  # float32 [n, heads, parts]: greatest scores
    sums,  # of exp(score - top)
    length,
    page,  # positions of one
    scale,
    cap,
    table_row,
    query_row,
    query_head,
    key_row,
    key_head,
    key_step,
    value_row,
    value_head,
    value_step,
    TOKENS: tl.constexpr,  # queries of a row, one behind the other
    SHARE: tl.constexpr,  # heads of queries for one of keys
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PAGED: tl.constexpr,  # else row i is page i
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,  # powers of two from here on, at least TOKENS * SHARE, WIDTH, VALUE_WIDTH
    WIDE: tl.constexpr,
    VALUE_WIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    row, group, program = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    # the heads of all tokens of a row read the same
    each, column, value_column = tl.arange(0, HEADS), tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    real, inside, value_inside = each < TOKENS * SHARE, column < WIDTH, value_column < VALUE_WIDTH
    token, heads = row * TOKENS + each // SHARE, group * SHARE + each % SHARE
    ends = tl.minimum(tl.load(positions + token, mask=real, other=0) + 1, length)
    end = tl.max(ends, 0)
    ends = tl.where(real, ends, end)
    begin = tl.maximum(tl.min(ends, 0) - WINDOW, 0) if WINDOW else end * 0
    span = tl.cdiv(tl.cdiv(end - begin, PARTS), STEP) * STEP
    low = begin + program * span
    high = tl.minimum(end, low + span)

    queries = tl.load(
        query + token[:, None] * query_row + heads[:, None] * query_head + column[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    table += row * table_row
    key += group * key_head
    value += group * value_head
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, VALUE_WIDE], tl.float32)
    for first in range(low, high, STEP):
        position = first + tl.arange(0, STEP)
        seen = position < high
        if PAGED:
            number, offset = tl.load(table + position // page, mask=seen, other=0), position % page
        else:
            number, offset = row, position
        from_keys = key + (number * key_row + offset * key_step)[None, :]
        keys = tl.load(from_keys + column[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee" if EXACT else "tf32") * scale
        if CAPPED:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
        visible = seen[None, :]
        if TOKENS > 1:
            visible = visible & (position[None, :] < ends[:, None])
            if WINDOW:
                visible = visible & (position[None, :] >= ends[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a token may see none of these
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(top - base)
        from_values = value + (number * value_row + offset * value_step)[:, None]
        values = tl.load(from_values + value_column[None, :], mask=seen[:, None] & value_inside[None, :], other=0.0)
        total = total * kept + tl.sum(weights, 1)
        product = tl.dot(weights.to(values.dtype), values, input_precision="ieee" if EXACT else "tf32")
        mixed = mixed * kept[:, None] + product
        top = higher
    both = real[:, None] & value_inside[None, :]
    cell = token * SHARE * tl.num_programs(1) + heads
    if PARTS == 1:
        if SINKS:
            sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32)
            higher = tl.maximum(top, sink)
            mixed = mixed * tl.exp(top - higher)[:, None]
            total = total * tl.exp(top - higher) + tl.exp(sink - higher)
        mixed = mixed / total[:, None]
        tl.store(out + cell[:, None] * VALUE_WIDTH + value_column[None, :], mixed.to(out.dtype.element_ty), mask=both)
    else:
        cell = cell * PARTS + program
        tl.store(out + cell[:, None] * VALUE_WIDTH + value_column[None, :], mixed, mask=both)
        tl.store(tops + cell, top, mask=real)
        tl.store(sums + cell, total, mask=real)


@triton.jit
def _join(
    mixed,  # results of several parts of `_attend`
    tops,
    sums,
    sinks,
    out,  # [n, heads, e]
    VALUE_WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two
    VALUE_WIDE: tl.constexpr,
):
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    position, column = (row * heads + head) * PARTS + tl.arange(0, PARTS), tl.arange(0, VALUE_WIDE)
    each, total = tl.load(tops + position), tl.load(sums + position)
    top = tl.max(each, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    weights = tl.exp(each - top)
    total = tl.sum(total * weights, 0)
    if SINKS:
        total += tl.exp(sink - top)
    inside = column < VALUE_WIDTH
    parts = tl.load(mixed + position[:, None] * VALUE_WIDTH + column[None, :], mask=inside[None, :], other=0.0)
    joined = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + (row * heads + head) * VALUE_WIDTH + column, joined.to(out.dtype.element_ty), mask=inside)


def parts_for(programs: int, length: int) -> int:
    """Return how many programs share the positions of a row: a power of two."""
    parts = 1
    while programs * parts < PROGRAMS and length >= 2 * parts * LEAST:
        parts *= 2
    return parts


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    table: Tensor,
    length: int,
    scores: ScoreRule,
    window: int = 0,
    tokens: int = 1,
) -> Tensor:
    """Compute query [n, heads, d] of rows of `tokens` new ones, key [pages, kv_heads, page, d], value [pages,
    kv_heads, page, e] -> [n, heads, e]. The last dimension of each is dense. Row i has the pages `table` [i] (int64
    on the device), or page i if all have one. A token at `positions` [i] (int64 [n] there) sees those up to it,
    with `window` only the last `window`, and none from `length` on."""
    (n, heads, width), (groups, page), value_width = query.shape, key.shape[1:3], value.shape[3]
    columns, share, rows = max(16, triton.next_power_of_2(width)), heads // groups, n // tokens
    parts = parts_for(rows * groups, min(length, window or length))
    mixed = tops = sums = out = query.new_empty(n, heads, value_width)  # one part needs neither tops nor sums
    if parts > 1:
        mixed = query.new_empty(n, heads, parts, value_width, dtype=torch.float32)
        tops, sums = (query.new_empty(n, heads, parts, dtype=torch.float32) for _ in range(2))
    wide: dict[str, Any] = {"SINKS": scores.sinks is not None, "PARTS": parts, "VALUE_WIDTH": value_width}
    wide["VALUE_WIDE"] = max(16, triton.next_power_of_2(value_width))
    scale, sinks = scores.scale or width**-0.5, out if scores.sinks is None else scores.sinks  # some tensor has to be
    _attend[rows, groups, parts](
        query,
        key,
        value,
        positions,
        table,
        sinks,
        *(mixed, tops, sums),
        length,
        page,
        scale,
        scores.softcap,
        table.stride(0),
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        TOKENS=tokens,
        SHARE=share,
        WIDTH=width,
        WINDOW=window,
        CAPPED=scores.softcap > 0,
        PAGED=table.shape[1] > 1,
        EXACT=query.dtype == torch.float32,
        HEADS=max(16, triton.next_power_of_2(share * tokens)),
        WIDE=columns,
        STEP=BLOCK * 256 // (query.element_size() * max(128, columns)),  # as many bytes for any head
        **wide,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if parts > 1:
        _join[n, heads](mixed, tops, sums, sinks, out, **wide, num_warps=1 if value_width <= 128 else 4)
    return out
