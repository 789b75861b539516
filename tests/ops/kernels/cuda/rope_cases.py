"""`aligner/ops/kernels/cuda/rope.py` against torch's operations in float64: in Triton's interpreter, or on the GPU.

python -m tests.ops.kernels.cuda.rope_cases     # prints the greatest differences; exit 1 where one is too large
"""

from __future__ import annotations

import itertools
import sys

import torch

from tests.ops.kernels.cuda.interpreted import DEVICE, differ

# kv heads, queries of each, numbers of a head, how many are rotated: also more heads than a program takes
SHAPES = [(2, 3, 8, 8), (1, 1, 16, 6), (3, 2, 40, 10), (2, 33, 80, 80), (1, 5, 12, 12), (4, 1, 256, 64)]


def wrong() -> int:
    from aligner.ops.kernels import elementwise as kernels  # imports Triton

    bad, g = 0, torch.Generator().manual_seed(0)
    options = SHAPES, (False, True), (torch.float32, torch.bfloat16)
    for (groups, share, d, r), neighbours, dtype in itertools.product(*options):
        for n in (0, 5):
            angles = torch.randn(n, 1, r // 2, generator=g)
            mixed = torch.randn(n, groups, share + 2, d, generator=g).to(DEVICE, dtype)
            heads = torch.randn(n, d, share + 3, generator=g).to(DEVICE, dtype)[:, :, :share].transpose(1, 2)
            cos, sin = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)

            def split(x, cos=cos, sin=sin, neighbours=neighbours):
                return kernels.split_and_rotate(x, cos.to(x.dtype), sin.to(x.dtype), neighbours)

            def rotate(x, cos=cos, sin=sin, neighbours=neighbours):
                return kernels.rotate(x, cos.to(x.dtype), sin.to(x.dtype), neighbours)

            bad += differ(f"split {[*mixed.shape]} {r=} {neighbours=}", split, split, mixed)
            bad += differ(f"rotate {[*heads.shape]} {r=} {neighbours=}", rotate, rotate, heads)
    return bad


if __name__ == "__main__":
    sys.exit(wrong() > 0)
