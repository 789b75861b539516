"""Files of some families keep several matrices in one tensor, rows after rows. Everything here speaks of the parts, by
the names that other families have; only reading and writing of files joins them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.config.schema import ModelConfig
from aligner.models.families import FAMILIES, Family, expected_hf_shapes


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of the tensor `stored`, which has `count`."""

    stored: str
    start: int
    stop: int
    count: int


def _place(name: str, family: Family) -> tuple[str, int, int]:
    """(name in the files, number of the part in it, number of its parts)."""
    for fused, parts in family.fused:
        for index, part in enumerate(parts):
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}."), index, len(parts)
    return name, 0, 1


def fused_rows(cfg: ModelConfig) -> dict[str, Rows]:
    """Where each part lies in the files of this model."""
    shapes, family = expected_hf_shapes(cfg), FAMILIES[cfg.family]
    sizes: dict[str, dict[int, tuple[str, int]]] = {}
    for name, shape in shapes.items():
        stored, index, count = _place(name, family)
        if count > 1:
            sizes.setdefault(stored, {})[index] = name, shape[0]
    out = {}
    for stored, parts in sizes.items():
        start, total = 0, sum(rows for _, rows in parts.values())
        for index in sorted(parts):
            name, rows = parts[index]
            out[name] = Rows(stored, start, start + rows, total)
            start += rows
    return out


def joined(tensors: Iterable[tuple[str, Tensor]], family_name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the family's files have them. Parts are copied until the last one of their tensor has come."""
    family, waiting = FAMILIES[family_name], dict[str, dict[int, Tensor]]()
    for name, tensor in tensors:
        stored, index, count = _place(name, family)
        if count == 1:
            yield name, tensor
            continue
        parts = waiting.setdefault(stored, {})
        parts[index] = tensor.clone()
        if len(parts) == count:
            yield stored, torch.cat([parts[i] for i in range(count)])
            del waiting[stored]
    assert not waiting, f"parts that never came: {sorted(waiting)}"
