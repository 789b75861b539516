"""Quantised weights of folders: the supported formats, and conversion to float32.

Float8 weights with a scale for each block (`Qwen3-*-FP8`): weight[i, j] * weight_scale_inv[i // rows, j // columns],
where [rows, columns] is `weight_block_size`; blocks at the lower and right edge may be smaller.

MXFP4 experts (gpt-oss; OCP Microscaling Formats, 1.0, section 5): 32 numbers of 4 bits at a time, two in a byte, the
lower half first, times 2^(scale - 127), the scale being a byte. A number: sign, 2 bits of exponent, 1 of mantissa.

DeepSeek-V4's folders call scales `scale`. Their experts may be MXFP4, too, in matrices of bytes [R, C / 2] and scales
[R, C / 32].
"""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.errors import CheckpointError

FLOAT8 = "F8_E4M3"  # safetensors' name
SCALE_NAMES = ("weight_scale_inv", "scale")  # beside `weight`
MXFP4, BYTES = "MXFP4", "U8"  # the latter is safetensors' name of its storage
PAIRS, POWERS = "I8", "F8_E8M0"  # those of the storage of single matrices, and of their scales
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the tensor's name
PACKED = 32  # numbers with one scale
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat([_FP4, -_FP4])
_BYTE = torch.arange(256)
_PAIRS = torch.stack([_FP4[_BYTE & 15], _FP4[_BYTE >> 4]], 1).view(torch.int64).flatten()  # of floats, as one number
_POWERS = torch.ldexp(torch.ones(256), _BYTE - 127)
_LARGEST = 252  # largest scale with which 6 is finite in float32; 255 means NaN


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    return tuple(-(-n // size) for n, size in zip(shape, block, strict=True))


def dequantised(
    name: str, stored: Tensor, scales: Tensor, block: tuple[int, int], first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Return float32 of a slice `stored` [R, C] of a weight, which begins at `first_row` and `first_column`.

    `scales` are those of the whole weight, and called `name`; one row of blocks is computed at a time. Raises
    CheckpointError for a scale that is not positive and finite.
    """
    scales = scales.float()
    if not (scales.isfinite().all() and (scales > 0).all()):
        raise CheckpointError(f"{name}: expected positive finite scales")
    out = torch.empty(stored.shape, dtype=torch.float32)
    columns = (torch.arange(stored.shape[1]) + first_column) // block[1]
    row = 0
    while row < len(stored):
        index = (first_row + row) // block[0]
        stop = min(len(stored), (index + 1) * block[0] - first_row)
        torch.mul(stored[row:stop].float(), scales[index, columns], out=out[row:stop])
        row = stop
    return out


def unpacked(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return float32 [R, 32 G] of bytes [R, G, 16] or [R, 16 G], and scales uint8 [R, G], which are called `name`.

    Raises CheckpointError for scales that are NaN or too large.
    """
    if (scales > _LARGEST).any():
        raise CheckpointError(f"{name}: expected scales up to {_LARGEST}, found {int(scales.max())}")
    numbers = _PAIRS.index_select(0, blocks.flatten().int()).view(torch.float32)
    return numbers.view(*scales.shape, PACKED).mul_(_POWERS[scales.int()][..., None]).flatten(1)
