"""Low-rank adapters (`model.lora`) in numbers: parameters, operations and collectives in addition to those of the
frozen weights.

Names: r the rank. One of Megatron's matrices has I inputs, O outputs and k targets that it is made of, so that A x has
k r numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR
from aligner.families.matrices import Split, is_matrix, outs_of, sizes_of, split_of
from aligner.families.rows import ParamSpec
from aligner.families.table import layer_table
from aligner.plan.job import PlannedModel
from aligner.plan.shapes import Count, Grid, Kinds, rank_parameters, recomputed, stage_layers

HELD_BITS = {"int8": 8.5, "fp8": 8.5, "nf4": 4.5}  # of a number in `ops/kernels/frozen.py`, with its share of a scale


@dataclass(frozen=True)
class Matrix:
    inner: int
    out: int
    targets: int  # k
    adapted: int  # rows of the targets among O
    split: Split
    experts: int = 0  # so many of them, over expert ranks
    late: bool = False  # reads only what `plan.reads` calls kept, in the last layer
    of_hidden: bool = False  # its input is the stream's

    def shares(self, tensor: int) -> int:
        """Return how many of `tensor` ranks of the trainer share it; experts are whole."""
        return 1 if self.experts or self.split == "none" else tensor


def is_adapted(model: PlannedModel) -> bool:
    return model.trained and model.shape.lora.rank > 0


def matrices(m: ModelConfig, kinds: Kinds) -> list[Matrix]:
    """Return the matrices of a layer that have adapters."""
    wanted = set(m.lora.targets)
    candidates = (_matrix(m, spec, wanted) for spec in _layer_matrices(m, kinds))
    return [matrix for matrix in candidates if matrix.targets]


Moved = tuple[str, float]  # a collective between tensor ranks, and its bytes


def _layer_matrices(m: ModelConfig, kinds: Kinds) -> list[ParamSpec]:
    return [spec for spec in layer_table(m, kinds) if is_matrix(spec)]


def _matrix(m: ModelConfig, spec: ParamSpec, wanted: set[str]) -> Matrix:
    """Return the matrix of a row of the layer's table. It is late if it neither mixes tokens nor feeds what mixes them:
    in the last layer it reads only kept tokens."""
    (out, inner), names = sizes_of(spec), [name.removesuffix(".weight").rpartition(".")[2] for name in spec.hf]
    sizes = zip(names, outs_of(spec, m), strict=True)
    adapted = [size for name, size in sizes if name in wanted or ALL_LINEAR in wanted]
    late = ".mlp." in spec.canonical or ".layer_input." in spec.canonical
    late |= spec.canonical.endswith(("linear_proj.weight", "out_proj.weight"))
    of_hidden = not late and not spec.canonical.endswith("_up_proj.weight")
    experts = m.moe.num_experts if spec.experts else 0
    return Matrix(inner, out, len(adapted), sum(adapted), split_of(spec), experts, late, of_hidden)


def _layers(m: ModelConfig, grid: Grid, stage: int) -> Iterator[list[Matrix]]:
    each = cache(partial(matrices, m))
    return map(each, stage_layers(m, grid, stage))


def factor_sizes(matrix: Matrix, m: ModelConfig, grid: Grid) -> tuple[int, int]:
    """Return the numbers of a rank's A and B: (those that tensor ranks share, those that all have whole), for experts
    of each one."""
    a, b, rank, shares = matrix.targets * matrix.inner, matrix.adapted, m.lora.rank, matrix.shares(grid.tensor)
    if matrix.split == "out":
        return rank * b // shares, rank * a
    return (rank * a // shares, rank * b) if matrix.split == "in" else (0, rank * (a + b))


def magnitudes(matrix: Matrix, m: ModelConfig, grid: Grid) -> tuple[int, int]:
    """Return the numbers of DoRA's magnitudes: (those that tensor ranks share, those that all have whole)."""
    size = matrix.adapted if m.lora.dora else 0
    return (size // matrix.shares(grid.tensor), 0) if matrix.split == "out" else (0, size)


def adapter_parameters(m: ModelConfig, grid: Grid, stage: int) -> Count:
    """Count the adapter parameters of one rank. Magnitudes, which are float32 like a score head, count as one, except
    those of experts."""
    total = Count()
    for kinds, layers in Counter(stage_layers(m, grid, stage)).items():
        for matrix in matrices(m, kinds):
            size, rows = layers * sum(factor_sizes(matrix, m, grid)), layers * sum(magnitudes(matrix, m, grid))
            near = matrix.experts // grid.expert
            total += Count(experts=near * size, magnitudes=near * rows) if near else Count(size, score=rows)
    return total


def kept_bytes(m: ModelConfig, element: int, tensor: int) -> float:
    """Return the bytes that one of `tensor` ranks of an engine that merges adapters itself keeps: its share of the
    matrices that have adapters, without them, and all factors."""
    grid, total = Grid(), 0.0
    for matrix in (x for layer in _layers(m, grid, 0) for x in layer):
        every = matrix.experts or 1
        total += every * element * matrix.inner * matrix.out / (1 if matrix.split == "none" else tensor)
        total += every * sum(_factor_bytes(matrix, m, grid, element))
    return total


def merging_bytes(model: PlannedModel, grid: Grid, stage: int, element: int) -> float:
    """Return the bytes used while matrices are merged one by one in float32: the product of factors, the matrix and the
    one before."""
    if not is_adapted(model):
        return 0.0
    sizes = [0.0]
    for matrix in (x for layer in _layers(model.shape, grid, stage) for x in layer):
        shares = matrix.shares(grid.tensor) * (grid.expert if matrix.experts else 1)
        sizes.append(matrix.inner * matrix.out * (matrix.experts or 1) / shares)
    return (4 + 4 + element) * max(sizes)


def sent_bytes(m: ModelConfig, grid: Grid, stage: int, element: int) -> dict[str, float]:
    """Return the bytes of the factors that a rank of stage `stage` lacks, by the axis that has them. A rank of an
    engine gets all."""
    sizes = {"tp": 0.0, "ep": 0.0, "pp": 0.0}
    for s in range(grid.pipeline):
        for matrix in (x for layer in _layers(m, grid, s) for x in layer):
            shared, whole = _factor_bytes(matrix, m, grid, element)
            every, near, shares = matrix.experts or 1, matrix.experts // grid.expert or 1, matrix.shares(grid.tensor)
            if s != stage:
                sizes["pp"] += every * (shared * shares + whole)
                continue
            sizes["tp"] += near * shared * (shares - 1)
            sizes["ep"] += (every - near) * (shared * shares + whole)
    return sizes


def _factor_bytes(matrix: Matrix, m: ModelConfig, grid: Grid, element: int) -> tuple[float, float]:
    """Return the bytes of a rank's factors: (those that tensor ranks share, those that all have whole). DoRA's are
    float32."""
    both = zip(factor_sizes(matrix, m, grid), magnitudes(matrix, m, grid), strict=True)
    shared, whole = (float(element * size + 4 * rows) for size, rows in both)
    return shared, whole


def held_parameters(model: PlannedModel, grid: Grid, stage: int) -> Count:
    """Count the parameters of one rank, with adapters."""
    count = rank_parameters(model.shape, grid, stage, model.head, model.outputs)
    return count + adapter_parameters(model.shape, grid, stage) if is_adapted(model) else count


def saved_bytes(model: PlannedModel, grid: Grid, stage: int, element: int) -> float:
    """Return the bytes of one rank's weights that are saved by holding matrices in fewer bits."""
    m, total = model.shape, 0.0
    if not is_adapted(model) or m.lora.quantize_base == "none":
        return total
    every, bits = replace(m, lora=replace(m.lora, targets=[ALL_LINEAR])), HELD_BITS[m.lora.quantize_base]
    for matrix in (x for layer in _layers(every, grid, stage) for x in layer if x.split != "none"):
        numbers = matrix.inner * matrix.out * (matrix.experts or 1) // matrix.shares(grid.tensor)
        total += numbers // (grid.expert if matrix.experts else 1) * (element - bits / 8)
    return total


def trained_parameters(model: PlannedModel, grid: Grid, stage: int) -> Count:
    """Count the parameters of one rank that have gradients and optimizer state."""
    count = rank_parameters(model.shape, grid, stage, model.head, model.outputs)
    if not is_adapted(model):
        return count
    return adapter_parameters(model.shape, grid, stage) + Count(score=count.score if model.head == "score" else 0)


def whole_numbers(model: PlannedModel, grid: Grid, stage: int) -> int:
    """Return the numbers of adapters that every tensor rank has whole, without experts'. Sequence parallelism sums
    their gradients."""
    m, total = model.shape, 0
    for matrix in (x for layer in _layers(m, grid, stage) for x in layer if not x.experts):
        total += factor_sizes(matrix, m, grid)[1] + magnitudes(matrix, m, grid)[1]
    return total


def _operations(matrix: Matrix, m: ModelConfig, grid: Grid, own: float, kept: float) -> tuple[float, float]:
    """Return the operations of A's products and of B's in a forward pass, on one rank. Without sequence parallelism
    every tensor rank multiplies the whole factor with all tokens, if it is no expert's. `own`: tokens of this rank's
    context share; `kept`: those of them that a late matrix reads."""
    tokens = (kept if matrix.late else own) * (m.moe.top_k if matrix.experts else 1)
    width, alike = matrix.targets * m.lora.rank, 1 / grid.tensor if grid.sequence or matrix.experts else 1.0
    a_share = 1 / grid.tensor if matrix.split == "in" else alike
    b_share = 1 / grid.tensor if matrix.split == "out" else alike
    return 2 * tokens * matrix.inner * width * a_share, 2 * tokens * matrix.out * width * b_share


def adapter_calls(
    model: PlannedModel, grid: Grid, own: float, kept: float, element: int, kinds: Kinds
) -> tuple[list[Moved], list[Moved]]:
    """Return the collectives of a layer's adapters between tensor ranks, forward and backward: of A x. Experts' have
    none."""
    m, forward, backward = model.shape, [], []
    for matrix in matrices(m, kinds):
        tokens, width = kept if matrix.late else own, matrix.targets * m.lora.rank
        if matrix.experts:
            continue
        if matrix.split == "out":
            if grid.sequence:
                forward.append(("all_gather", element * tokens * width))
            backward.append(("reduce_scatter" if grid.sequence else "all_reduce", element * tokens * width))
        elif matrix.split == "in":
            forward.append(("reduce_scatter" if grid.sequence else "all_reduce", element * tokens * width))
            if grid.sequence:
                backward.append(("all_gather", element * tokens * width))
            if m.lora.dora:
                forward.append(("all_reduce", 4.0 * matrix.out))
    return forward, backward


def adapter_operations(
    model: PlannedModel, grid: Grid, stage: int, own: float, kept: float, backward: bool, recompute: int
) -> float:
    """Return the operations on one rank of a stage, with `kept` tokens in the last layer of all. The first layer's
    inputs need no gradient, unless any of it is recomputed or stages follow. With DoRA every pass also computes B A."""
    m, total = model.shape, 0.0
    layers, again = list(_layers(m, grid, stage)), recomputed(m, grid, stage, recompute)
    for i, layer in enumerate(layers):
        last, forward = stage == grid.pipeline - 1 and i == len(layers) - 1, 1 + (backward and again[i])
        for matrix in layer:
            a, b = _operations(matrix, m, grid, own, kept if last else own)
            total += (forward + 2 * backward) * (a + b)
            if backward and i == 0 and matrix.of_hidden and needs_no_input_gradient(m, grid, stage, recompute):
                total -= a
            if m.lora.dora:
                product = 2 * matrix.inner * matrix.out * matrix.targets * m.lora.rank
                product *= matrix.experts // grid.expert or 1
                total += forward * product / matrix.shares(grid.tensor)
    return total


def needs_no_input_gradient(m: ModelConfig, grid: Grid, stage: int, recompute: int) -> bool:
    """Return whether a stage's first layer has an input from a frozen embedding."""
    return stage == 0 and grid.pipeline == 1 and not recompute and not m.recomputed_modules


def first_operations(m: ModelConfig, grid: Grid, own: float) -> float:
    """Return the operations, on one rank, of the gradient that the inputs of the first layer's frozen matrices would
    have."""
    total = 0.0
    for spec in _layer_matrices(m, m.layer_kinds(0)):
        matrix = _matrix(m, spec, set())
        if matrix.of_hidden:
            share = 1 / grid.tensor if matrix.split == "out" or grid.sequence else 1.0
            total += 2 * own * share * matrix.inner * matrix.out
    return total


def adapter_widths(m: ModelConfig, kinds: Kinds, tensor: int) -> float:
    """Return the numbers of a token that a layer keeps for backward in addition: A x and, with DoRA, the magnitudes'
    factors."""
    total = 0.0
    for matrix in matrices(m, kinds):
        often = m.moe.top_k / tensor if matrix.experts else 1
        total += often * matrix.targets * m.lora.rank
        kept = 2 * often if matrix.experts else 1  # of experts each token has the factor of its own
        total += m.lora.dora * kept * matrix.out / (matrix.shares(tensor) if matrix.split == "out" else 1)
    return total
