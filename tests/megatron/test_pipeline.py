"""Pipeline stages exchange activations and gradients, and nothing else. That they learn the same, with micro-batches of
many lengths, is in `test_layouts.py`."""

import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.pipeline import Pipeline
from aligner.roles.batching import micro_batches
from tests.megatron.models import build, nll_loss
from tests.ranks import on_ranks
from tests.tiny import ADAM, LLAMA, batch

pytestmark = pytest.mark.multirank

LAYOUTS = {
    "pp2": (2, ParallelConfig(pipeline=2)),
    "tp2-sequence-pp2": (4, ParallelConfig(pipeline=2, tensor=2, sequence=True)),
    "cp2-pp2": (4, ParallelConfig(pipeline=2, context=2)),
}


class Noted:
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


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS.values(), ids=LAYOUTS)
@on_ranks()
def test_no_message_tells_a_shape(world, parallel):
    """Of one forward pass and one step over rows of unequal length."""
    model, full = build(LLAMA, parallel, ADAM), batch(LLAMA)
    parts, forward, step = micro_batches(full, BatchConfig(micro_batch_samples=2)), [], []
    with mock.patch.object(torch.cuda, "synchronize") as waited:
        with Noted(forward):
            model.forward(parts, lambda output, b: output)
        with Noted(step):
            model.step(parts, nll_loss(model, full))
    share = parallel.tensor if parallel.sequence else 1
    shapes = [(model._pack(piece.trim()).tokens // share, 1, LLAMA.hidden_size) for piece in parts]
    assert len(set(shapes)) > 1, "micro-batches of one length show nothing"
    assert forward == ([] if model.layout.pp_rank else shapes)
    assert step == shapes  # activations of the first stage, gradients of the last
    assert not waited.called


@on_ranks(2)
def test_stages_that_take_turns_send_what_those_of_as_many_ranks_send():
    """Of four stages on two ranks, with micro-batches of unequal length."""
    cfg, forward, step = replace(LLAMA, num_layers=4), [], []
    model, full = build(cfg, ParallelConfig(pipeline=2, virtual_stages=2), ADAM), batch(cfg)
    parts = micro_batches(full, BatchConfig(micro_batch_samples=2))
    with Noted(forward):
        model.forward(parts, lambda output, b: output)
    with Noted(step):
        model.step(parts, nll_loss(model, full))
    shapes = [(model._pack(piece.trim()).tokens, 1, cfg.hidden_size) for piece in parts]
    assert sorted(forward) == sorted(shapes * (1 if model.layout.pp_rank else 2)), "the last has nothing behind it"
    assert sorted(step) == sorted(shapes * 3)


@on_ranks(2)
def test_the_last_stage_forgets_what_it_has_learned_from():
    """Each micro-batch is received, computed and sent back before the next one."""
    model, full = build(LLAMA, ParallelConfig(pipeline=2), ADAM), batch(LLAMA)
    parts = micro_batches(full, BatchConfig(micro_batch_samples=1))
    before, alive = [], []  # of what was received before, how much is still there when the next has come

    def noting(receive):
        def receive_and_note(*args):
            tensors = receive(*args)
            alive.append(sum(tensor() is not None for tensor in before))
            before.extend(weakref.ref(tensor) for tensor in tensors if tensor is not None)
            return tensors

        return receive_and_note

    receiving = {name: noting(getattr(Pipeline, name)) for name in ("recv_forward", "send_backward_recv_forward")}
    with mock.patch.multiple(Pipeline, **receiving):
        model.step(parts, nll_loss(model, full))
    if not model.layout.is_last_stage:
        return
    assert len(alive) > 2 and max(alive) == 1, alive  # the schedule's variable has the one before
    assert not any(tensor() is not None for tensor in before)
