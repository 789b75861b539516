"""Decode steps as CUDA graphs: the hundreds of small kernels of a step are launched at once (`engine.cuda_graphs`).

A graph replays the same kernels on the same addresses, so it is made for one number of rows and one reach (positions
that attention looks at), both rounded up, and a cache that stays where it is. Its first step runs as it is, the second
is recorded; both have the rounded shapes, so that a run that is resumed, whose graphs are new, computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.engines.native.cache import SlotCache
from aligner.engines.native.model import NativeModel
from aligner.engines.native.scratch import Scratch

REACH = 128  # positions: the mask hides what lies beyond a row, attention reads it all the same
Step = Callable[[], Tensor]
Record = Callable[[Step], tuple[Callable[[], None], Tensor]]  # -> (replay, the tensor that a replay fills)


def rounded_rows(rows: int, slots: int) -> int:
    """Up to a multiple of a sixteenth of the power of two above, at least of 8, at most the slots: little more than is
    needed, and few graphs for a generation."""
    unit = max(8, 1 << max(0, (rows - 1).bit_length() - 4))
    return min(slots, -(-rows // unit) * unit)


class CudaRecorder:
    """All graphs share one pool of memory: they run one after the other, and each result is used before the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        graph, side, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may allocate
            out = step()
            graph.capture_end()
        current.wait_stream(side)
        return graph.replay, out


@dataclass
class _Graph:
    replay: Callable[[], None] | None = None  # None: ran once
    logits: Tensor | None = None


class DecodeGraphs:
    """`NativeModel.decode` for rows in slots [0, n), for caches with free slots behind them: those are written to."""

    def __init__(self, model: NativeModel, record: Record):
        self.model, self._record = model, record
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._place: tuple = ()
        self._inputs = torch.empty(0, dtype=torch.int64)

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache, longest: int) -> Tensor:
        """See `NativeModel.decode`; the result lives until the next call."""
        slots, capacity = cache.kv.shape[2], cache.kv.shape[4]
        place = cache.kv.data_ptr(), cache.kv.shape
        if self._place != place:
            self.clear()
            self._place, self._inputs = place, torch.zeros(2, slots, dtype=torch.int64, device=tokens.device)
            self.model.reach(capacity)
        n, rows = len(tokens), rounded_rows(len(tokens), slots)
        self._inputs[0, :n].copy_(tokens)
        self._inputs[1, :n].copy_(positions)
        self._inputs[:, n:rows] = 0  # token 0 at position 0 of a free slot
        reach = min(capacity, -(-longest // REACH) * REACH)

        def step() -> Tensor:
            return self.model.decode(self._inputs[0, :rows], self._inputs[1, :rows], cache, reach)

        graph = self._graphs.get((rows, reach))
        if graph is None:
            self._graphs[rows, reach] = _Graph()
            return step()[:n]
        if graph.replay is None:
            graph.replay, graph.logits = self._recorded(step)
        graph.replay()
        return graph.logits[:n]

    def _recorded(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        """With intermediates in the graphs' own memory: those of other calls are replaced when they must grow."""
        scratch, self.model.scratch = self.model.scratch, Scratch(self.model.device, self.model.dtype)
        try:
            return self._record(step)
        finally:
            self.model.scratch = scratch

    def clear(self) -> None:
        """Forget all graphs: after this the cache and the weights may go."""
        self._graphs.clear()
        self._place = ()
