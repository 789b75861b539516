"""Operations and messages of Muon's updates (`megatron/muon.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aligner.config.sections.model.config import ModelConfig
from aligner.families.matrices import is_matrix, outs_of, sizes_of
from aligner.families.table import layer_table
from aligner.plan.shapes import Grid, stage_layers

STEPS = 5  # of Newton-Schulz


def muon_operations(m: ModelConfig, grid: Grid, stage: int) -> float:
    """Return the operations of one rank's Newton-Schulz steps: of a matrix X [a, b] with a <= b, A = X X', A A and
    their sum times X. Ranks that hold the same matrix each compute it."""
    total = 0.0
    for count, *sides, _ in _updated(m, grid, stage):
        a, b = sorted(sides)
        total += count * STEPS * (4 * a * a * b + 2 * a**3)
    return total


def gathered_numbers(m: ModelConfig, grid: Grid, stage: int) -> tuple[float, int]:
    """Return the numbers of the matrices that tensor ranks gather whole, and how many matrices."""
    gathered = [(count, out * inner) for count, out, inner, shared in _updated(m, grid, stage) if shared]
    return float(sum(count * size for count, size in gathered)), sum(count for count, _ in gathered)


def _updated(m: ModelConfig, grid: Grid, stage: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yield how many of a matrix one rank updates, its sides, and whether tensor ranks share it."""
    for kinds, layers in Counter(stage_layers(m, grid, stage)).items():
        for spec in filter(is_matrix, layer_table(m, kinds)):
            count = layers * spec.shape[0] // grid.expert if spec.experts else layers
            shared = grid.tensor > 1 and spec.tp_axis is not None and not spec.experts
            for out in outs_of(spec, m):
                yield count, out, sizes_of(spec)[1], shared
