"""`aligner/ops/kernels/cuda/decode.py` against a loop in float64: in Triton's interpreter, or on the GPU.

python -m tests.ops.kernels.cuda.decode_cases 0 48     # prints the greatest differences; exit 1 where one is too large
"""

from __future__ import annotations

import itertools
import os
import random
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from aligner.ops.kernels.cuda.decode import LEAST, attend, parts_for
from aligner.ops.kernels.scored_attention import ScoreRule

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # whose products the interpreter knows
DTYPES = {torch.float32: 1e-5, HALF: 2e-2 if torch.cuda.is_available() else 2e-3}


def wanted(query, key, value, positions, scale, softcap, sinks, window):
    out = []
    for row, position in enumerate(positions.tolist()):
        end = min(position + 1, key.shape[2])
        seen = slice(max(0, end - window) if window else 0, end)
        own = row * len(key) // len(query)
        q, k, v = query[row].double(), key[own, :, seen].double(), value[own, :, seen].double()
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = torch.einsum("hd,htd->ht", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        out.append(torch.einsum("ht,hte->he", scores.softmax(1)[:, : k.shape[1]], v))
    return torch.stack(out)


def cases(count: int, seed: int = 0):
    """Arguments of `attend`: views of a cache whose slots are longer, of heads of odd widths and shares."""
    r = random.Random(seed)
    every = list(itertools.product(DTYPES, (0.0, 3.0), (False, True), (0, 5, 300)))
    for dtype, softcap, has_sinks, window in itertools.islice(itertools.cycle(every), count):
        g = torch.Generator().manual_seed(r.randrange(1 << 30))
        n, groups, share = r.randint(1, 3), r.randint(1, 3), r.choice([1, 2, 3, 5, 8, 17])
        width, length = r.choice([6, 16, 40, 64, 128, 256]), r.choice([1, 7, 64, 129, 2 * LEAST, 5 * LEAST])
        value_width = r.choice([width, width, 10])
        tokens = r.choice([1, 1, 3])
        query = torch.randn(n * tokens, 2 * groups * share, width, generator=g)[:, : groups * share]
        key = torch.randn(n, groups, length, width, generator=g)
        value = torch.randn(n, groups, length, value_width, generator=g)
        positions = torch.randint(0, length, (n * tokens,), generator=g)
        positions[0] = r.choice([0, length - 1, length + 5])  # beyond the reach, as a free slot of a graph
        sinks = torch.randn(groups * share, generator=g).to(dtype) if has_sinks else None
        yield *(x.to(dtype) for x in (query, key, value)), positions, width**-0.5, softcap, sinks, window


def paged(rows: torch.Tensor, page: int, table: torch.Tensor) -> torch.Tensor:
    """The rows [n, kv_heads, T, d] in the pages of a pool, behind other numbers."""
    pool = torch.full((int(table.max()) + 2, 2 * rows.shape[1], page, rows.shape[3]), float("nan"), dtype=rows.dtype)
    pool = pool[:, : rows.shape[1]].zero_()
    for row, pages in zip(rows, table.tolist(), strict=True):
        for number, held in zip(pages, row.split(page, 1), strict=True):
            pool[number, :, : held.shape[1]] = held
    return pool


def differences(first: int = 0, last: int = 48, device: str = "cpu") -> list[tuple[float, float, str]]:
    """(the greatest difference, what is allowed, the case) of each."""
    results = []
    for case in itertools.islice(cases(last), first, None):
        q, k, v, _, scale, softcap, sinks, window = case
        scores = ScoreRule(scale, softcap, None if sinks is None else sinks.to(device))
        length = k.shape[2]
        page = length + 9 if len(results) % 3 == 0 else (5, 64)[len(results) % 2]  # whole rows, or shorter pages
        row_pages = -(-length // page)
        table = 1 + torch.randperm(len(k) * row_pages).view(len(k), row_pages)
        table = table if row_pages > 1 else torch.arange(len(k))[:, None]
        pool = (x.to(device) for x in (q, paged(k, page, table), paged(v, page, table), case[3], table))
        off = attend(*pool, length, scores, window, len(q) // len(k)).cpu().double() - wanted(*case)
        parts = parts_for(len(q) * k.shape[1], k.shape[2])
        text = f"{[*q.shape]} {[*k.shape]} {[*v.shape]} {q.dtype} {softcap=} sinks={sinks is not None} {window=}"
        results.append((float(off.abs().max()), DTYPES[q.dtype], f"{text} {parts=} {page=}"))
    return results


if __name__ == "__main__":
    bad = 0
    first, last = map(int, sys.argv[1:])
    for off, allowed, text in differences(first, last, "cuda" if torch.cuda.is_available() else "cpu"):
        bad += not off <= allowed
        print(f"{'' if off <= allowed else 'WRONG '}{off:.2e} {text}")
    sys.exit(bad > 0)
