"""Pipeline messages whose shapes every stage knows.

Micro-batches are as long as their rows. For that Megatron (`variable_seq_lengths`) sends every shape ahead: two more
messages at each exchange, and a host that waits for the device. Here all stages pack the same rows, so each knows the
shape of the next message from the packing it needs anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from aligner.megatron.groups import Layout
from aligner.megatron.sharing import LayerConfig, with_fields
from aligner.types import TrainBatch

Prepared = tuple[TrainBatch, Any]  # a micro-batch with its `packing`, and attention's view of it


class Pipeline(P2PCommunicator):
    """Megatron's exchanges for its schedules, and for each stage of this rank the iterator that feeds its forward steps
    what is `prepared`. A rank prepares a micro-batch just before it receives it for the first time."""

    def __init__(self, layout: Layout, config: LayerConfig, prepared: Iterator[Prepared], count: int, streams: int = 1):
        """`streams`: hidden states of a token between stages."""
        super().__init__(layout.pgs.pp, with_fields(config, variable_seq_lengths=True))
        self._prepared, self._shares = prepared, layout.tensor if layout.sequence else 1  # ranks that share a stream
        self._width = streams * config.hidden_size
        self._ready: list[deque[Prepared]] = [deque() for _ in range(layout.virtual_stages)]
        self._shapes: list[tuple[int, int, int]] = []  # of the micro-batches that have been prepared
        # All ranks compute in this order, and receive in it. What comes from the last rank to the first one, and its
        # gradient, is of all stages on a rank but one.
        order = get_schedule_table(count, layout.virtual_stages, layout.pipeline)
        every = [number for number, _ in order]
        around = [number for number, stage in order if stage < layout.virtual_stages - 1]
        self._inputs = iter(around if layout.is_first_stage else every)
        self._gradients = iter(around if layout.is_last_stage else every)

    def feeds(self) -> list[Iterator[Prepared]]:
        return [self._feed(ready) for ready in self._ready]

    def _feed(self, ready: deque[Prepared]) -> Iterator[Prepared]:
        while True:
            if not ready:
                self._prepare()
            yield ready.popleft()

    def _prepare(self) -> None:
        one = next(self._prepared)
        self._shapes.append((one[0].packing.tokens // self._shares, 1, self._width))
        for ready in self._ready:
            ready.append(one)

    def _shape(self, number: int) -> tuple[int, int, int]:
        while number >= len(self._shapes):
            self._prepare()
        return self._shapes[number]

    def _communicate_shapes(self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool):
        """Return the shapes of what comes from the rank before and from the next one, for which Megatron asks both."""
        before = self._shape(next(self._inputs)) if recv_prev else (0, 0, 0)
        return before, self._shape(next(self._gradients)) if recv_next else (0, 0, 0)
