"""Decode steps as CUDA graphs: the hundreds of small kernels of a step are launched at once (`engine.cuda_graphs`).

A graph replays the same kernels on the same addresses. So it is made for one number of rows, one of tokens for each,
one reach (positions that attention looks at) and one cache in memory. Rows and reach are rounded up. Its first step
runs directly, the second is recorded. Both have the rounded shapes, so that a resumed run, whose graphs are new,
computes the same.
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
    """`NativeModel.decode` and `advance` as graphs, for rows in slots [0, n). The cache needs free slots behind them:
    those are written to. `drafted`: most tokens of a step whose rows have several."""

    def __init__(self, model: NativeModel, record: GraphRecorder, drafted: int = 1 << 62):
        self.model, self._record, self._drafted = model, record, drafted
        self._graphs: dict[tuple[int, int, int], Callable[[], None] | None] = {}  # None: ran once
        self._memory: tuple = ()
        # by tokens of a row: inputs int64 [2, rows, tokens], and of the last step float32 logits [rows * tokens, V] and
        # the hidden states that drafts need
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes of inputs and results; the device's allocator counts the graphs' intermediates."""
        return sum(tensor.nbytes for buffers in self._buffers.values() for tensor in buffers)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, longest: int, heard: list[Tensor] | None = None
    ) -> Tensor:
        """See `NativeModel.decode`; the result lives until the next call. Hidden states are added to `heard` if the
        model's layer for multi-token prediction reads them."""
        slots, capacity = cache.table.shape.slots, cache.table.shape.row_tokens
        self.model.extend_rotations(capacity)
        places = [each.kv.data_ptr() for each in cache.kinds]
        memory = places, cache.table.pages.data_ptr(), cache.table.shape, self.model.rotations_at
        if self._memory != memory:
            self.clear()
            self._memory = memory
        (n, width), rows = tokens.shape, rounded_rows(len(tokens), slots)
        inputs, result, hidden = self._own(width, slots, tokens.device)
        inputs[0, :n].copy_(tokens)
        inputs[1, :n].copy_(positions)
        inputs[0, n:rows] = 0
        # in a slot without a running row: no row that continues reaches so far
        inputs[1, n:rows] = torch.arange(capacity - width, capacity, device=tokens.device)
        reach = rounded_reach(longest, capacity)

        def step() -> None:
            own: list[Tensor] = []
            asked = inputs[0, :rows], inputs[1, :rows], cache, reach
            logits = self.model.decode(*asked, heard=own, fused=tokens.is_cuda)
            result[: rows * width].copy_(logits)
            if len(hidden):
                hidden[: rows * width].copy_(own[0])

        self._run((rows, width, reach), step)
        if heard is not None and len(hidden):
            heard.append(hidden[: n * width])
        return result[: n * width]

    def advance(self, kept: Tensor, width: int, cache: SlotCache) -> None:
        """See `NativeModel.advance`, behind a step of `width` tokens for each row."""
        if self.model.linear is None:
            return
        n, slots = len(kept), cache.table.shape.slots
        rows, inputs = rounded_rows(n, slots), self._own(width, slots, kept.device)[0][0, :, 0]
        inputs[:n].copy_(kept)
        inputs[n:rows] = 0
        self._run((rows, width, 0), lambda: self.model.advance(inputs[:rows], width, cache))

    def _run(self, key: tuple[int, int, int], step: Callable[[], None]) -> None:
        if key not in self._graphs:
            self._graphs[key] = None
            step()
        else:
            replay = self._graphs[key] = self._graphs[key] or self._recorded(step)
            replay()

    def _own(self, width: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the buffers of steps of rows with so many tokens."""
        if width not in self._buffers:
            rows = slots if width == 1 else rounded_rows(min(slots, self._drafted // width), slots)
            inputs = torch.zeros(2, rows, width, dtype=torch.int64, device=device)
            logits = torch.empty(rows * width, self.model.cfg.vocab_size, device=device)
            needed = rows * width if self.model.ahead is not None else 0
            hidden = torch.empty(needed, self.model.cfg.hidden_size, dtype=self.model.dtype, device=device)
            self._buffers[width] = inputs, logits, hidden
        return self._buffers[width]

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
        self._memory = ()
        self._buffers.clear()
