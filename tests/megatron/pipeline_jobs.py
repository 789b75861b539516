"""What the ranks run for `test_pipeline.py`."""

from __future__ import annotations

import weakref
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.pipeline import Pipeline
from aligner.roles.batching import micro_batches
from tests.megatron.jobs import build, nll_loss
from tests.tiny import ADAM, LLAMA, batch


def messages(parallel: ParallelConfig, dtype: torch.dtype = torch.float32) -> dict:
    """Of one forward pass and one step over rows of unequal length: shapes of what this rank sends to other stages, by
    pass; how often the host waits for the device; tokens of its stream in each micro-batch."""
    model, full = build(LLAMA, parallel, ADAM, dtype=dtype), batch(LLAMA)
    parts = micro_batches(full, BatchConfig(micro_batch_samples=2))
    sent, waits = {"forward": [], "step": []}, Counter()
    with mock.patch.object(torch.cuda, "synchronize", lambda *a: waits.update(["synchronize"])):
        with _noted(sent["forward"]):
            model.forward(parts, lambda output, b: output)
        with _noted(sent["step"]):
            model.step(parts, nll_loss(model, full))
    tokens = [model._pack(part.trim()).tokens for part in parts]
    return {"stage": model.layout.pp_rank, "sent": sent, "waits": dict(waits), "tokens": tokens}


def received(parallel: ParallelConfig) -> list[int]:
    """How many of the activations that this stage received before are still there when the next ones have come, and
    after a step."""
    model, full = build(LLAMA, parallel, ADAM), batch(LLAMA)
    parts = micro_batches(full, BatchConfig(micro_batch_samples=1))
    before, alive = [], []

    def noting(receive):
        def receive_and_note(*args):
            tensors = receive(*args)
            alive.append(sum(tensor() is not None for tensor in before))
            before.extend(weakref.ref(tensor) for tensor in tensors if tensor is not None)
            return tensors

        return receive_and_note

    with mock.patch.multiple(
        Pipeline,
        recv_forward=noting(Pipeline.recv_forward),
        send_backward_recv_forward=noting(Pipeline.send_backward_recv_forward),
    ):
        model.step(parts, nll_loss(model, full))
    return [*alive, sum(tensor() is not None for tensor in before)]


class _noted:
    """Shapes of point-to-point messages, in the order in which they were sent; those that Megatron would batch too."""

    def __init__(self, shapes: list):
        self.shapes, self.isend, self.batch = shapes, dist.isend, dist.batch_isend_irecv

    def __enter__(self):
        def isend(tensor, *args, **kwargs):
            self.shapes.append(tuple(tensor.shape))
            return self.isend(tensor, *args, **kwargs)

        def batched(operations):
            self.shapes += [tuple(op.tensor.shape) for op in operations]
            return self.batch(operations)

        dist.isend, dist.batch_isend_irecv = isend, batched

    def __exit__(self, *unused):
        dist.isend, dist.batch_isend_irecv = self.isend, self.batch
