"""The matrices of a model's products: plain while weights are written and read, laid out for their kernels while rows
are computed (`ops/kernels/packed_products.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aligner.cluster.pages import ask_for_large_pages, give_back_freed_memory
from aligner.ops.kernels.packed_products import address, pack, worth_packing

_KEPT = 32 << 20  # bytes of a name that may stay with the process: giving pages back costs a trainer beside it new ones
_GAP = 1 << 20  # bytes between two matrices that large pages may take with them


class Packs:
    """Of `matrices` [layers, n, k] by name: one layout takes the place of the other, which are never both there but for
    one name at a time, and for those that are read `also_plain`. Plain ones stay the same tensors over the same
    storage, which alone is emptied and filled again."""

    def __init__(self, matrices: Mapping[str, Tensor], also_plain: tuple[str, ...] = ()):
        self._plain = dict(matrices)
        self._also_plain = also_plain
        self._worth = [name for name, layers in matrices.items() if len(layers) and worth_packing(layers[0])]
        self._packed: dict[str, list[Tensor]] = {}
        self._emptied: set[str] = set()

    def __getitem__(self, at: tuple[str, int]) -> Tensor:
        """The matrix of a name and layer, in the layout that is there."""
        name, layer = at
        return self._packed[name][layer] if name in self._packed else self._plain[name][layer]

    @property
    def held_bytes(self) -> int:
        """Of what is packed."""
        return sum(matrix.nbytes for layers in self._packed.values() for matrix in layers)

    def pack(self) -> None:
        """Before rows are computed."""
        for name in self._worth:
            if name not in self._packed:
                plain = self._plain[name]
                self._packed[name] = [pack(matrix) for matrix in plain]
                _ask_for_large_pages(self._packed[name])
                storage = plain.untyped_storage()
                if name not in self._also_plain and storage.resizable():  # not if numpy has seen it
                    storage.resize_(0)
                    self._emptied.add(name)

    def unpack(self) -> None:
        """Before plain ones are written or read. Their bits are what they were. Packed ones go last: where memory is
        short, the next call finds them."""
        while self._packed:
            name = next(reversed(self._packed))
            if name in self._emptied:
                plain = self._plain[name]
                plain.untyped_storage().resize_(plain.nbytes)
                with torch.inference_mode():
                    for layer, matrix in enumerate(plain):
                        matrix.copy_(self._packed[name][layer].to_dense())
                self._emptied.remove(name)
            del self._packed[name]
            if self._plain[name].nbytes > _KEPT:
                give_back_freed_memory()  # plain ones are too large to be laid into what is kept of these

    def clear(self) -> None:
        self._plain, self._packed, self._worth, self._emptied = {}, {}, [], set()


def _ask_for_large_pages(packed: Sequence[Tensor]) -> None:
    """They mostly lie one behind the other, and few of them fill such pages by themselves."""
    places = sorted((address(matrix), address(matrix) + matrix.nbytes) for matrix in packed)
    start, stop = places[0]
    for first, last in places[1:]:
        if first - stop > _GAP:
            ask_for_large_pages(start, stop)
            start = first
        stop = last
    ask_for_large_pages(start, stop)
