"""The layout of each Hugging Face tensor in the trainer's shards, and its split over an engine's tensor ranks.

It follows the rows of `families/table.py`. Unlike `to_hf`, which needs whole canonical tensors, it returns slices of
Hugging Face tensors as views into a shard, which can be copied without a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap

from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import LayoutError
from aligner.families.matrices import rows_of_group
from aligner.families.table import family_table
from aligner.models.params import ParamSpec, expected_hf_shapes, hf_axis, shard_interval
from aligner.ops.kernels.checksum import part_checksum

INTERLEAVED = ("qkv", "qkv_bias", "linear_in")  # the canonical tensor alternates rows of its Hugging Face tensors


@dataclass(frozen=True)
class HfTensor:
    """One Hugging Face tensor. A slice of it is `[start, stop)` along `axis`, in entries of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    spec: ParamSpec
    index: int  # in spec.hf
    group_rows: tuple[int, int] = (0, 0)  # if interleaved: first row and number of rows in a query group

    @property
    def sharded(self) -> bool:
        return self.spec.tp_axis is not None

    @cached_property
    def axis(self) -> int:
        """The axis that tensor ranks cut; 0 if each rank holds the whole."""
        return hf_axis(self.spec) or 0

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @cached_property
    def entry_numel(self) -> int:
        """Elements of one entry of the axis."""
        total = 1
        for i, size in enumerate(self.shape):
            total *= size if i != self.axis else 1
        return total

    def entry_words(self, item_bytes: int) -> int:
        """Return the words of `item_bytes` that hold an entry: its elements, or the bits of those that keep a dtype."""
        kept = 8 if self.spec.integer else 4 if self.spec.float32 else item_bytes
        return self.entry_numel * (kept // item_bytes)

    @property
    def quantum(self) -> int:
        """Slices begin and end at multiples of it.

        It is the rows of a query group, a whole vector that all ranks hold, a head of a vector that they share, else 1.
        """
        vector = len(self.shape) == 1 and self.spec.transform == "copy"
        piece = self.length // (self.spec.units if self.sharded else 1)
        return self.group_rows[1] or (piece if vector else 1)

    @property
    def expert(self) -> int:
        return self.index // (self.spec.shape[1] if self.spec.transform == "experts_gate_up" else 1)

    def interval(self, tensor: int, rank: int) -> tuple[int, int]:
        """Return the slice of tensor rank `rank` of `tensor`. Where they are more than the heads of keys and values,
        neighbours have the same head, and each its own queries. Each expert is whole on one of them. Raises
        LayoutError if the ranks cannot share it."""
        if tensor > 1 and self.spec.experts:
            return 0, self.length * (self.expert in own_experts(self.spec.shape[0], tensor, rank))
        if not self.sharded or tensor == 1:
            return 0, self.length
        units = self.spec.units
        if self.spec.repeats and units < tensor and tensor % units == 0:
            if self.index or len(self.spec.hf) == 1:  # no queries
                tensor, rank = units, rank * units // tensor
        elif not self.spec.padded and units % tensor:
            raise LayoutError("tensor parallelism", tensor, f"a divisor of {units} (pieces of {self.name})")
        return shard_interval(self.length, tensor, rank)

    def checksum(self, values: Tensor, start: int, stop: int) -> int:
        """Return the contribution of [start, stop) to the tensor's `ops.checksum.tensor_checksum`.

        `values` holds its elements in order, in the dtype that is compared.
        """
        below = self.entry_numel if self.axis == 0 else 1  # the cut axis is the first or last
        assert self.axis == 0 or self.axis == len(self.shape) - 1, self
        return part_checksum(values, (stop - start) * below, self.length * below, start * below)

    def view(self, shard: Tensor, first: int, first_expert: int, start: int, stop: int) -> Tensor:
        """Return the slice [start, stop) as a view into a trainer's shard.

        The shard begins at entry `first` (and at expert `first_expert`). The view has the element order of the Hugging
        Face tensor, in any shape.
        """
        spec, a, b = self.spec, start - first, stop - first
        if spec.transform == "copy":
            return shard.narrow(self.axis, a, b - a)
        if spec.transform == "gate_up":
            return shard.unflatten(0, (2, -1))[self.index, a:b]
        if spec.transform == "experts_gate_up":
            return shard[self.expert - first_expert, self.index % spec.shape[1], a:b]
        if spec.transform == "experts":
            return shard[self.expert - first_expert].narrow(self.axis, a, b - a)
        assert spec.transform in INTERLEAVED, f"{spec.transform}: no view of its slices"
        (at, rows), groups = self.group_rows, spec.units
        grouped = shard.unflatten(0, (-1, spec.shape[0] // groups))
        return grouped[a // rows : -(-b // rows), at + a % rows : at + (b - 1) % rows + 1]  # groups, or of one a share


def own_experts(experts: int, tensor: int, rank: int) -> range:
    """Return the experts of a layer that tensor rank `rank` of an engine's `tensor` has. Numbers of two ranks differ by
    at most one."""
    first, last = (-(-x * experts // tensor) for x in (rank, rank + 1))
    return range(first, last)


def hf_tensors(cfg: ModelConfig, head: str = "lm", num_labels: int = 1) -> tuple[HfTensor, ...]:
    """Return every tensor of a model of this shape, in the order of the family table."""
    shapes, tensors = expected_hf_shapes(cfg, head, num_labels), []
    for spec in family_table(cfg, head, num_labels):
        sizes = rows_of_group(spec, cfg) if spec.transform in INTERLEAVED else []
        for index, name in enumerate(spec.hf):
            rows = (sum(sizes[:index]), sizes[index]) if sizes else (0, 0)
            tensors.append(HfTensor(name, shapes[name], spec, index, rows))
    return tuple(tensors)


def copy_elements(target: Tensor, source: Tensor) -> None:
    """Copy source to target element by element in row-major order, for any shapes and strides, without a buffer."""
    target, source = aligned(target, source)
    target.copy_(source, non_blocking=True)


def aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the coarsest shape that splits the dimensions of each: same shape, same order of elements.

    Splitting a dimension is always a view.
    """
    shape, below = [], 1
    for end in sorted(_ends(a) | _ends(b)):
        assert end % below == 0, f"{tuple(a.shape)} and {tuple(b.shape)} have no common refinement"
        shape.append(end // below)
        below = end
    shape.reverse()
    return a.view(shape), b.view(shape)


def joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return fewer (target, source) of the same copies. Neighbours of one shape at equal distances in the memory of
    both become one, with one more dimension."""
    distances = [*starmap(_distances, pairwise(pairs)), None]  # from each to the next
    results, begin = [], 0
    while begin < len(pairs):
        end, steps = begin + 1, distances[begin]
        while steps is not None and distances[end - 1] == steps:
            end += 1
        if steps is None:
            results.append(pairs[begin])
        else:
            results.append(
                tuple(
                    t.as_strided((end - begin, *t.shape), (step, *t.stride()), t.storage_offset())
                    for t, step in zip(pairs[begin], steps, strict=True)
                )
            )
        begin = end
    return results


def _distances(one: tuple[Tensor, Tensor], following: tuple[Tensor, Tensor]) -> tuple[int, int] | None:
    """Return the distances in elements from one pair to the next; None if they are not alike."""
    steps = []
    for before, t in zip(one, following, strict=True):
        alike = before.shape == t.shape and before.stride() == t.stride() and before.dtype == t.dtype
        if not alike or before.untyped_storage()._cdata != t.untyped_storage()._cdata:
            return None
        steps.append(t.storage_offset() - before.storage_offset())
    return tuple(steps) if min(steps) > 0 else None


def _ends(t: Tensor) -> set[int]:
    """Return products of the last 1, 2, ... sizes."""
    ends, total = set(), 1
    for size in reversed(t.shape):
        total *= size
        ends.add(total)
    return ends
