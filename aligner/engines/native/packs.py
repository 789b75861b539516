"""The matrices of a model's products: plain while weights are written and read, laid out for their kernels while rows
are computed (`ops/kernels/packed_products.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aligner.cluster.memory_pages import KEPT, ask_for_large_pages, give_back_freed_memory
from aligner.ops.kernels.packed_products import pack, pack_over, place_of, worth_packing

_GAP = 1 << 20  # bytes between two matrices that large pages may take with them
At = tuple[str, int]  # name and layer


def matrices(
    layers: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device, empty: Callable[..., Tensor]
) -> Sequence[Tensor]:
    """Return matrices in one block, unless they will be packed: then each in memory of its own."""
    if worth_packing(torch.empty(1, dtype=dtype, device=device).expand(rows, columns)):
        return [empty(rows, columns) for _ in range(layers)]
    return empty(layers, rows, columns).unbind()


class PackedMatrices:
    """The `plain` matrices [n, k] by name, one for each layer, and their packed forms. Each that is worth packing has a
    storage of its own.

    Plain ones stay the same tensors over the same storage, which is emptied when they are packed, except for those
    that are read `also_plain`. Packed ones stay in place while all are written afresh, and are freed when plain ones
    are read or written in shards. `views` of plain ones are their names outside.
    """

    def __init__(
        self,
        plain: Mapping[str, Sequence[Tensor]],
        views: Mapping[str, Tensor],
        also_plain: tuple[str, ...] = (),
        packs: bool = True,
    ):
        self._plain = {(name, layer): m for name, layers in plain.items() for layer, m in enumerate(layers)}
        self._also_plain = also_plain
        self._packed: dict[At, Tensor] = {}
        self._outdated: set[At] = set()  # of the packed ones: plain ones have been written since
        self._emptied: set[At] = set()
        self._worth = [at for at, matrix in self._plain.items() if packs and worth_packing(matrix)]
        assert all(self._plain[at].untyped_storage().nbytes() == self._plain[at].nbytes for at in self._worth)
        storages = {self._plain[at].untyped_storage().data_ptr(): at for at in self._worth}
        places = {name: view.untyped_storage().data_ptr() for name, view in views.items()}
        self._places = {name: storages[address] for name, address in places.items() if address in storages}

    def __getitem__(self, at: At) -> Tensor:
        """Return the matrix, in the layout that rows are computed with, once `pack` has been called."""
        assert at not in self._outdated, at
        return self._packed[at] if at in self._packed else self._plain[at]

    @property
    def held_bytes(self) -> int:
        """The bytes of the packed matrices."""
        return sum(matrix.nbytes for matrix in self._packed.values())

    def pack(self) -> None:
        """Pack the matrices, before rows are computed."""
        new, freed = [], 0
        for at in self._worth:
            if at in self._packed and at not in self._outdated:
                continue
            plain, before = self._plain[at], self._packed.get(at)
            packed = self._packed[at] = pack(plain) if before is None else pack_over(before, plain)
            self._outdated.discard(at)
            if packed is not before:
                new.append(packed)
            storage = plain.untyped_storage()
            if at[0] not in self._also_plain and storage.resizable():  # not if numpy has seen it
                storage.resize_(0)
                self._emptied.add(at)
                if before is None and plain.nbytes <= KEPT:
                    freed += plain.nbytes
            if freed > KEPT:
                give_back_freed_memory()  # packed ones take as much; only weights written afresh would reuse it
                freed = 0
        _ask_for_large_pages(new)

    def unpack(self) -> None:
        """Unpack all matrices, before plain ones are read. Their bits are unchanged."""
        for at in list(self._packed):
            self._open(at)

    def open(self, name: str, afresh: bool) -> None:
        """Unpack the matrix of view `name`, before it is written or read. If the whole matrix is written `afresh`,
        it may have any content."""
        if name in self._places:
            self._open(self._places[name], afresh)

    def _open(self, at: At, afresh: bool = False) -> None:
        """Restore the plain matrix. The packed one is freed last: where memory is short, the next call still has it."""
        if at in self._emptied:
            plain = self._plain[at]
            plain.untyped_storage().resize_(plain.nbytes)
            if not afresh:
                with torch.inference_mode():
                    plain.copy_(self._packed[at].to_dense())
            self._emptied.remove(at)
        if not afresh:
            self._packed.pop(at, None)
            self._outdated.discard(at)
        elif at in self._packed:
            self._outdated.add(at)

    def forget(self) -> None:
        """Forget the packed matrices. Their plain ones are not restored."""
        self._packed, self._outdated, self._emptied = {}, set(), set()

    def clear(self) -> None:
        self.forget()
        self._plain, self._worth, self._places = {}, [], {}


def _ask_for_large_pages(packed: Sequence[Tensor]) -> None:
    """Ask for large pages for adjacent matrices together: few fill such pages alone."""
    places = sorted(map(place_of, packed))
    while places:
        start, stop = places.pop(0)
        while places and places[0][0] - stop <= _GAP:
            stop = places.pop(0)[1]
        ask_for_large_pages(start, stop)
