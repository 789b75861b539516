"""`ops/kernels/cuda/pair_sums.py` against torch's operations in float64: in Triton's interpreter, or on the GPU.

python -m tests.ops.kernels.cuda.pair_sums_cases     # prints the greatest differences; exit 1 for a large one
"""

from __future__ import annotations

import itertools
import sys

import torch

from tests.ops.kernels.cuda.interpreted import DEVICE, differ

SHAPES = [(5, 3, 4, 12), (7, 8, 8, 6), (3, 9, 1, 1025), (2, 4, 2, 2880), (0, 4, 2, 8)]  # tokens, experts, k, H


def wrong() -> int:
    from aligner.ops.kernels.experts import add_up, combine, expand, sort_pairs  # imports Triton

    bad, g = 0, torch.Generator().manual_seed(0)
    types = torch.float32, torch.bfloat16
    for (n, experts, k, width), dtype, fewer in itertools.product(SHAPES, types, (False, True)):
        chosen = torch.rand(n, max(experts, k), generator=g).argsort(1)[:, :k] % experts
        if fewer:
            chosen[torch.rand(n, k, generator=g) < 0.4] = experts
        rows = int((chosen < experts).sum())
        pairs, _ = sort_pairs(chosen.to(DEVICE), experts, rows)
        x = torch.randn(width, n, generator=g).t().to(DEVICE, dtype)
        outs = torch.randn(rows, width, generator=g).to(DEVICE, dtype)
        weights = torch.rand(n, k, generator=g).to(DEVICE, dtype)
        bad += differ(f"expand {[n, k, width]}", lambda x, p=pairs: expand(x, p), lambda x, p=pairs: expand(x, p), x)
        bad += differ(f"add up {[n, k, width]}", lambda x, p=pairs: add_up(x, p), lambda x, p=pairs: add_up(x, p), outs)
        combined = lambda x, w, p=pairs: combine(x, p, w)  # noqa: E731
        bad += differ(f"combine {[n, k, width]}", combined, combined, outs, weights)
    return bad


if __name__ == "__main__":
    sys.exit(wrong() > 0)
