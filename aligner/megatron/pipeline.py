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
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from aligner.megatron.groups import Layout
from aligner.types import TrainBatch

Prepared = tuple[TrainBatch, Any]  # a micro-batch with its `packing`, and attention's view of it


class Pipeline(P2PCommunicator):
    """Megatron's exchanges for its schedule without interleaving, and the iterator that feeds its forward steps what
    is `prepared`. A stage receives each micro-batch just before it computes it, and gradients in the same order."""

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
        """Prepare the next micro-batch and return its shape."""
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
