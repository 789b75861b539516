"""Tensors of files that hold several matrices: rows after rows, or those of all experts.

Other modules use the single matrices, by the names that other families have; only reading and writing of files joins
them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.families.family import Family
from aligner.models.params import expected_hf_shapes

_EXPERT = re.compile(r"(?P<before>.+\.experts\.)(?P<number>\d+)\.(?P<matrix>\w+\.\w+)")
STACKED = (("gate_up_proj", ("gate_proj.weight", "up_proj.weight")), ("down_proj", ("down_proj.weight",)))
Shape = tuple[int, ...]


@dataclass(frozen=True)
class FusedMatrix:
    """A matrix at `index` of the tensor `stored`, which has this shape; optionally transposed there."""

    stored: str
    shape: Shape
    index: tuple[int | slice, ...]
    transposed: bool = False

    def along(self, axis: int, start: int, stop: int) -> FusedMatrix:
        """Return [start, stop) along an axis of the matrix."""
        axes = [i for i, at in enumerate(self.index) if isinstance(at, slice)]
        position = axes[::-1][axis] if self.transposed else axes[axis]
        whole, index = self.index[position], list(self.index)
        assert isinstance(whole, slice)
        first, step = whole.start or 0, whole.step or 1
        index[position] = slice(first + start * step, first + stop * step - step + 1, step)
        return replace(self, index=tuple(index))

    def turned(self, tensor: Tensor) -> Tensor:
        """Transpose between the tensor at `index` and the matrix, in either direction."""
        return tensor.mT if self.transposed else tensor


def parts_of(cfg: ModelConfig) -> dict[str, FusedMatrix]:
    """Return the location of each matrix in the files of this model."""
    family = cfg.traits
    shapes = expected_hf_shapes(cfg) if family.joined else {}
    parts = joined_rows(family, shapes) | _experts(family, shapes, cfg.moe.num_experts)
    for name, shape in shapes.items() if family.stored else ():
        matrix = parts.get(name, FusedMatrix(name, shape, (slice(None),) * len(shape)))
        for ours, theirs in family.stored:
            if matrix.stored.startswith(ours):
                parts[name] = replace(matrix, stored=theirs + matrix.stored.removeprefix(ours))
    return parts


def joined_rows(family: Family, shapes: dict[str, Shape]) -> dict[str, FusedMatrix]:
    """Return the location of each matrix that files join with others, rows after rows, under transformers' names."""
    located = {}
    for fused, parts in family.fused:
        for name in (name for name in shapes if f".{parts[0]}." in name):
            names = [name.replace(f".{parts[0]}.", f".{matrix}.") for matrix in parts]
            counts = [shapes[matrix][0] for matrix in names]
            whole, first = (sum(counts), *shapes[name][1:]), 0
            for matrix, count in zip(names, counts, strict=True):
                rows = slice(first, first + count)
                stored = name.replace(f".{parts[0]}.", f".{fused}.")
                located[matrix] = FusedMatrix(stored, whole, (rows, *[slice(None)] * (len(whole) - 1)))
                first += count
    return located


def _experts(family: Family, shapes: dict[str, Shape], experts: int) -> dict[str, FusedMatrix]:
    stacked = STACKED if family.experts_stacked else family.stacked
    positions = {matrix: (i, len(parts), name) for name, parts in stacked for i, matrix in enumerate(parts)}
    located = {}
    for name, shape in shapes.items():
        match = _EXPERT.fullmatch(name)
        if match is None or match["matrix"] not in positions:
            continue
        position, count, stored = positions[match["matrix"]]
        if family.experts_stacked:
            rows, columns = shape
            index = int(match["number"]), slice(position * rows, (position + 1) * rows), slice(None)
            located[name] = FusedMatrix(match["before"] + stored, (experts, count * rows, columns), index)
            continue
        *columns, last = reversed(shape)
        whole = (experts, *columns, count * last)
        located[name] = FusedMatrix(
            match["before"] + stored,
            whole,
            (int(match["number"]), *[slice(None)] * len(columns), slice(position, None, count)),
            len(shape) > 1,
        )
    return located


def joined(tensors: Iterable[tuple[str, Tensor]], parts: Mapping[str, FusedMatrix]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as files store them. `parts` is the result of `parts_of`.

    A fused tensor is yielded after its last matrix.
    """
    waiting, left = dict[str, Tensor](), Counter(matrix.stored for matrix in parts.values())
    for name, tensor in tensors:
        matrix = parts.get(name)
        if matrix is None:
            yield name, tensor
            continue
        if matrix.stored not in waiting:
            waiting[matrix.stored] = tensor.new_empty(matrix.shape)
        matrix.turned(waiting[matrix.stored][matrix.index]).copy_(tensor)
        left[matrix.stored] -= 1
        if not left[matrix.stored]:
            yield matrix.stored, waiting.pop(matrix.stored)
    assert not waiting, f"tensors with missing matrices: {sorted(waiting)}"
