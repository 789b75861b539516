"""Files of some families keep several matrices in one tensor: rows after rows, or those of all experts. Everything here
speaks of the parts, by the names that other families have; only reading and writing of files joins them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.families.family import Family
from aligner.models.params import expected_hf_shapes

_EXPERT = re.compile(r"(?P<before>.+\.experts\.)(?P<number>\d+)\.(?P<part>\w+\.\w+)")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class FusedPart:
    """`index` of the tensor `stored`, which has this shape; transposed there or not."""

    stored: str
    shape: Shape
    index: tuple[int | slice, ...]
    transposed: bool = False

    def along(self, axis: int, start: int, stop: int) -> FusedPart:
        """[start, stop) along an axis of the part."""
        axes = [i for i, at in enumerate(self.index) if isinstance(at, slice)]
        place = axes[::-1][axis] if self.transposed else axes[axis]
        all_of_it, index = self.index[place], list(self.index)
        assert isinstance(all_of_it, slice)
        first, step = all_of_it.start or 0, all_of_it.step or 1
        index[place] = slice(first + start * step, first + stop * step - step + 1, step)
        return replace(self, index=tuple(index))

    def turned(self, found: Tensor) -> Tensor:
        """Between what lies at `index` and the part, either way."""
        return found.mT if self.transposed else found


def parts_of(cfg: ModelConfig) -> dict[str, FusedPart]:
    """Where each part lies in the files of this model."""
    family = cfg.traits
    shapes = expected_hf_shapes(cfg) if family.joined else {}
    return _rows(family, shapes) | _experts(family, shapes, cfg.moe.num_experts)


def _rows(family: Family, shapes: dict[str, Shape]) -> dict[str, FusedPart]:
    found = {}
    for fused, parts in family.fused:
        for name in (name for name in shapes if f".{parts[0]}." in name):
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            counts = [shapes[part][0] for part in names]
            whole, first = (sum(counts), *shapes[name][1:]), 0
            for part, count in zip(names, counts, strict=True):
                rows = slice(first, first + count)
                stored = name.replace(f".{parts[0]}.", f".{fused}.")
                found[part] = FusedPart(stored, whole, (rows, *[slice(None)] * (len(whole) - 1)))
                first += count
    return found


def _experts(family: Family, shapes: dict[str, Shape], experts: int) -> dict[str, FusedPart]:
    places = {part: (i, len(parts), name) for name, parts in family.stacked for i, part in enumerate(parts)}
    found = {}
    for name, shape in shapes.items():
        match = _EXPERT.fullmatch(name)
        if match is None or match["part"] not in places:
            continue
        place, count, stored = places[match["part"]]
        *columns, last = reversed(shape)
        whole = (experts, *columns, count * last)
        found[name] = FusedPart(
            match["before"] + stored,
            whole,
            (int(match["number"]), *[slice(None)] * len(columns), slice(place, None, count)),
            len(shape) > 1,
        )
    return found


def joined(tensors: Iterable[tuple[str, Tensor]], parts: Mapping[str, FusedPart]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the files have them whose `parts_of` are given. A tensor of parts waits for the last of them."""
    waiting, left = dict[str, Tensor](), Counter(part.stored for part in parts.values())
    for name, tensor in tensors:
        part = parts.get(name)
        if part is None:
            yield name, tensor
            continue
        if part.stored not in waiting:
            waiting[part.stored] = tensor.new_empty(part.shape)
        part.turned(waiting[part.stored][part.index]).copy_(tensor)
        left[part.stored] -= 1
        if not left[part.stored]:
            yield part.stored, waiting.pop(part.stored)
    assert not waiting, f"parts that never came: {sorted(waiting)}"
