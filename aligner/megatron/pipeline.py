"""Pipeline messages whose shapes every stage knows.

Micro-batches are as long as their rows. Megatron's way with that (`variable_seq_lengths`) asks the neighbour for every
shape: two more messages, and a host that waits for the device, at each exchange. But all stages pack the same rows, so
each finds the shape of what comes by packing them, which it has to do anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from aligner.megatron.groups import Layout
from aligner.types import TrainBatch

Prepared = tuple[TrainBatch, Any]  # a micro-batch with its `packing`, and what attention must know of it


class Pipeline(P2PCommunicator):
    """Megatron's exchanges for its schedule without interleaving, and the iterator from which its forward steps take
    what is `prepared`: a stage receives each micro-batch just before it computes it, and gradients in the same
    order."""

    def __init__(self, layout: Layout, config: TransformerConfig, prepared: Iterator[Prepared]):
        super().__init__(layout.pgs.pp, config)
        self._prepared = prepared
        self._ready: deque[Prepared] = deque()
        self._owed: deque[tuple[int, int, int]] = deque()  # shapes of the gradients to come
        self._shares = layout.tensor if layout.sequence else 1  # ranks that share the tokens of a stream

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        return self._ready.popleft()

    def _coming(self) -> list[tuple[int, int, int]]:
        """The shape of the next micro-batch, which is prepared for it."""
        self._ready.append(next(self._prepared))
        tokens = self._ready[-1][0].packing.tokens
        self._owed.append((tokens // self._shares, 1, self.config.hidden_size))
        return [self._owed[-1]]

    def recv_forward(self, tensor_shapes: list, is_first_stage: bool) -> list[Tensor | None]:
        return super().recv_forward(self._coming(), is_first_stage)

    def send_backward_recv_forward(self, input_tensor_grads: list, tensor_shapes: list, is_first_stage: bool) -> list:
        return super().send_backward_recv_forward(input_tensor_grads, self._coming(), is_first_stage)

    def recv_backward(self, tensor_shapes: list, is_last_stage: bool) -> list[Tensor | None]:
        return super().recv_backward([self._owed.popleft()], is_last_stage)

    def send_forward_recv_backward(self, output_tensors: list, tensor_shapes: list, is_last_stage: bool) -> list:
        return super().send_forward_recv_backward(output_tensors, [self._owed.popleft()], is_last_stage)
