"""Rotary embedding (arXiv:2104.09864), and the split of Megatron's queries, keys and values, in one kernel each way.

A pair (a, b) of a head becomes (a cos - b sin, b cos + a sin), backward with -sin. The first r numbers of a head are
rotated as pairs (i, i + r/2), or as neighbours (2i, 2i + 1); the others are copied. Each number is read and written
once; torch's operations move five for each that is rotated. Rounded as by those: after the product with cos, and after
the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

PAIRS, WARPS = 1024, 4  # of a program


@triton.jit
def _rotate(
    mixed,  # [n, groups, SHARE + EXTRA, d], dense
    query,  # [n, groups * SHARE, d]
    key,  # [n, groups, d]
    value,  # [n, groups, d]
    cos,  # [n, r / 2], dense
    sin,
    heads,  # of `mixed`
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    SHARE: tl.constexpr,
    EXTRA: tl.constexpr,  # 2: a key and a value behind the queries of a group; 0: none
    HALF: tl.constexpr,  # r / 2
    WIDTH: tl.constexpr,  # d
    NEIGHBOURS: tl.constexpr,
    BACK: tl.constexpr,  # from the others to `mixed`
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,  # powers of two, at least HALF and WIDTH - 2 HALF
    REST: tl.constexpr,  # 0: none
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    group, slot, real = head // (SHARE + EXTRA), head % (SHARE + EXTRA), (head < heads)[:, None]
    dtype = mixed.dtype.element_ty
    mixed += ((row * heads + head) * WIDTH)[:, None]
    apart = query + (row * query_row + (group * SHARE + slot) * query_head)[:, None]
    turned = 1.0
    if EXTRA:
        key += (row * key_row + group * key_head)[:, None]
        value += (row * value_row + group * value_head)[:, None]
        apart = tl.where(slot[:, None] < SHARE, apart, tl.where(slot[:, None] == SHARE, key, value))
        turned = (slot <= SHARE)[:, None].to(tl.float32)
    source, into = (apart, mixed) if BACK else (mixed, apart)

    pair = tl.arange(0, PAIRS)
    both = real & (pair < HALF)[None, :]
    c = tl.load(cos + row * HALF + pair, pair < HALF, 0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + pair, pair < HALF, 0.0).to(tl.float32)[None, :] * turned
    c = c * turned + (1 - turned)
    s = -s if BACK else s
    at_a, at_b = pair[None, :], pair[None, :] + HALF
    if NEIGHBOURS:
        at_a, at_b = 2 * pair[None, :], 2 * pair[None, :] + 1
    a, b = tl.load(source + at_a, both, 0.0).to(tl.float32), tl.load(source + at_b, both, 0.0).to(tl.float32)
    tl.store(into + at_a, ((a * c).to(dtype).to(tl.float32) - b * s).to(dtype), both)
    tl.store(into + at_b, ((b * c).to(dtype).to(tl.float32) + a * s).to(dtype), both)
    if REST:
        column = 2 * HALF + tl.arange(0, REST)
        both = real & (column < WIDTH)[None, :]
        tl.store(into + column[None, :], tl.load(source + column[None, :], both, 0.0), both)


def rotate(mixed: Tensor, parts: Sequence[Tensor], cos: Tensor, sin: Tensor, neighbours: bool, back: bool) -> None:
    """Rotate mixed [n, groups, heads of a group, d], dense, into parts [n, ., d], whose heads are dense: queries, keys
    and values, or all heads. cos, sin [n, ..., r/2]. With `back` from the parts into `mixed`, by the other angle."""
    n, groups, each, width = mixed.shape
    half, extra = cos.shape[-1], len(parts) - 1
    pairs, rest = triton.next_power_of_2(half), width - 2 * half
    step = max(1, PAIRS // pairs)
    query, key, value = parts if extra else [*parts] * 3
    _rotate[n, triton.cdiv(groups * each, step)](
        mixed,
        query,
        key,
        value,
        cos.contiguous(),
        sin.contiguous(),
        groups * each,
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        SHARE=each - extra,
        EXTRA=extra,
        HALF=half,
        WIDTH=width,
        NEIGHBOURS=neighbours,
        BACK=back,
        HEADS=step,
        PAIRS=pairs,
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=WARPS,
    )
