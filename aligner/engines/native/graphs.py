"""Decode steps as CUDA graphs: the hundreds of small kernels of a step are launched at once (`engine.cuda_graphs`).

A graph replays the same kernels on the same addresses. So it is made for one number of rows and one reach (positions
that attention looks at), both rounded up, and one cache in memory. Its first step runs directly, the second is
recorded. Both have the rounded shapes, so that a resumed run, whose graphs are new, computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from aligner.engines.native.cache import SlotCache
from aligner.engines.native.model import NativeModel
from aligner.engines.native.scratch import Scratch

REACH = 128  # positions that a cache grows by


def rounded_reach(longest: int, capacity: int) -> int:
    """Round up to a multiple of a quarter of the power of two above. Attention reads no row beyond its end, except
    for latent and very wide heads, where only a mask hides the rest."""
    unit = max(REACH, 1 << max(0, (longest - 1).bit_length() - 2))
    return min(capacity, -(-longest // unit) * unit)


def rounded_rows(rows: int, slots: int) -> int:
    """Round up to a multiple of a sixteenth of the power of two above, at least of 8, at most to the slots. That
    wastes few rows, and needs few graphs for a generation."""
    unit = max(8, 1 << max(0, (rows - 1).bit_length() - 4))
    return min(slots, -(-rows // unit) * unit)


class GraphRecorder(Protocol):
    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record a step; return a function that replays its operations on the memory that they use now."""
        ...

    def forget(self) -> None:
        """Forget everything that was recorded."""
        ...


class CudaRecorder:
    """A recorder whose graphs share one pool of memory for their intermediates: they run one after the other, and
    leave their result elsewhere."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph, and cannot be taken up again

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # other threads may allocate
            step()
        return graph.replay


class DecodeGraphs:
    """`NativeModel.decode` as graphs, for rows in slots [0, n). The cache needs free slots behind them: those are
    written to."""

    def __init__(self, model: NativeModel, record: GraphRecorder):
        self.model, self._record = model, record
        self._graphs: dict[tuple[int, int], Callable[[], None] | None] = {}  # None: ran once
        self._memory: tuple = ()
        self._inputs = torch.empty(0, dtype=torch.int64)
        self._logits = torch.empty(0)  # float32 [slots, V], of the last step

    @property
    def held_bytes(self) -> int:
        """The bytes of inputs and logits; the device's allocator counts the graphs' intermediates."""
        return self._inputs.nbytes + self._logits.nbytes

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache, longest: int) -> Tensor:
        """See `NativeModel.decode`; the result lives until the next call."""
        slots, capacity = cache.table.shape.slots, cache.table.shape.row_tokens
        self.model.extend_rotations(capacity)
        places = [each.kv.data_ptr() for each in cache.kinds]
        memory = places, cache.table.pages.data_ptr(), cache.table.shape, self.model.rotations_at
        if self._memory != memory:
            self.clear()
            self._memory, device = memory, tokens.device
            self._inputs = torch.zeros(2, slots, dtype=torch.int64, device=device)
            self._logits = torch.empty(slots, self.model.cfg.vocab_size, device=device)
        n, rows = len(tokens), rounded_rows(len(tokens), slots)
        self._inputs[0, :n].copy_(tokens)
        self._inputs[1, :n].copy_(positions)
        self._inputs[0, n:rows] = 0
        self._inputs[1, n:rows] = capacity - 1  # in a slot without a running row: no row that continues reaches so far
        reach = rounded_reach(longest, capacity)

        def step() -> None:
            asked = self._inputs[0, :rows], self._inputs[1, :rows], cache, reach
            logits = self.model.decode(*asked, fused=tokens.is_cuda)
            self._logits[:rows].copy_(logits)

        key = rows, reach
        if key not in self._graphs:
            self._graphs[key] = None
            step()
        else:
            replay = self._graphs[key] = self._graphs[key] or self._recorded(step)
            replay()
        return self._logits[:n]

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record with intermediates in the graphs' own memory: those of other calls are replaced when they must
        grow."""
        scratch, self.model.scratch = self.model.scratch, Scratch(self.model.device, self.model.dtype)
        try:
            return self._record(step)
        finally:
            self.model.scratch = scratch

    def clear(self) -> None:
        """Forget all graphs: afterwards the cache and the weights may be released."""
        self._graphs.clear()
        self._record.forget()
        self._memory, self._inputs, self._logits = (), self._inputs.new_empty(0), self._logits.new_empty(0)
