"""Gradients are scaled, and shared out, as Megatron does it, in fewer passes over memory."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.train import ShardedModel
from aligner.megatron.update import norm_of_all, scale_all
from tests.megatron.models import build, nll_loss, one_more, shares
from tests.ranks import on_ranks
from tests.tiny import ADAM, LLAMA, MOE, MORE, SGD, batch, relative

pytestmark = pytest.mark.multirank


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 3])
@on_ranks(1)
def test_one_norm_of_many_is_megatrons(count):
    tensors = [torch.randn(7, i + 1) for i in range(count)]
    with Reads() as reads:
        one, _ = norm_of_all(1, torch.zeros(1), [tensors], False)
    wanted, _ = local_multi_tensor_l2_norm(1, torch.zeros(1), [tensors], False)
    assert one.dtype == wanted.dtype and one.shape == wanted.shape and float(one) == float(wanted)
    assert reads.count == 0


@pytest.mark.parametrize("count", [0, 3])
@on_ranks(1)
def test_all_are_scaled_as_by_megatron(count):
    """Over themselves, as Megatron clips, and into others."""
    tensors = [torch.randn(7, i + 1) for i in range(count)]
    over, wanted, into = ([t.clone() for t in tensors] for _ in range(3))
    local_multi_tensor_scale(1, torch.zeros(1), [tensors, wanted], 0.3)
    scale_all(1, torch.zeros(1), [over, over], 0.3)
    scale_all(1, torch.zeros(1), [tensors, into], 0.3)
    for result in (over, into):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_one_rank_shares_out_nothing(world):
    model, full = build(LLAMA, ParallelConfig(), ADAM), batch(LLAMA)
    with torch.profiler.profile() as profile:
        model.step([shares(model, full)], nll_loss(model, full))
    counts = Counter({event.key: event.count for event in profile.key_averages()})
    for name in ("c10d::reduce_scatter_tensor_coalesced_", "c10d::allgather_into_tensor_coalesced_"):
        assert counts[name] == world - 1, name


def begun(model: ShardedModel, steps: list[list]) -> list[list[str]]:
    """What begins in each step's last passes: the reduction of a bucket of gradients, or the end of the backward."""
    seen, finish = [], model.module.config.finalize_model_grads_func
    for bucket in model.wrapped.bucket_groups + model.wrapped.expert_parallel_bucket_groups:
        start = bucket.start_grad_sync
        bucket.start_grad_sync = lambda start=start, **options: (seen[-1].append("bucket"), start(**options))

    def end(*args, **options):
        seen[-1].append("end")
        finish(*args, **options)

    model.module.config.finalize_model_grads_func = end
    for rows in steps:
        seen.append([])
        model.step(rows, nll_loss(model, batch(model.cfg)))
    return seen


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(pipeline=2)], ids=["dp2", "pp2"])
@on_ranks(2)
def test_gradients_travel_while_others_are_computed(parallel):
    """From the second step on: in the first Megatron learns which gradients come."""
    model = build(LLAMA, parallel, ADAM)
    first, second = begun(model, [[shares(model, batch(LLAMA))] * 2] * 2)
    assert first[0] == "end" and second == [*first[1:], "end"]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ["moe", "lora", "lora of experts", *MORE])
@on_ranks(1)
def test_every_parameter_has_a_gradient_whatever_the_rows(name):
    """A bucket whose gradients do not all come in the last micro-batch would never be reduced. Here it has one token
    to predict or none, and most experts no token."""
    lora = LoraConfig(rank=2, dora=True, targets=[ALL_LINEAR])
    own = {"moe": MOE, "lora": replace(LLAMA, lora=lora), "lora of experts": replace(MOE, lora=lora)}
    cfg = (own | MORE)[name]
    model, full = build(cfg, optim=ADAM), batch(cfg)
    short = replace(full.select(torch.arange(1)), lengths=torch.tensor([2]))
    unread = replace(short, loss_mask=torch.zeros_like(short.loss_mask), wanted=torch.zeros_like(short.tokens) > 0)
    buckets = len(model.wrapped.bucket_groups + model.wrapped.expert_parallel_bucket_groups)
    for order in begun(model, [[full], [full, short], [full, unread], [full]])[1:]:
        assert order == ["bucket"] * buckets + ["end"]


@pytest.mark.parametrize("distributed", [True, False])
@on_ranks(2)
def test_gradients_are_summed_in_bfloat16(distributed):
    """On two ranks of three micro-batches each, the last of them a row more than the others."""
    steps = {}
    for name in ("float32", "bfloat16"):
        optim = replace(SGD, gradient_dtype=name, distributed=distributed)
        model = build(replace(MOE, tie_embeddings=False), optim=optim, dtype=torch.bfloat16)
        assert {buffer.grad_data.dtype for buffer in model.wrapped.buffers} == {getattr(torch, name)}
        steps[name] = one_more(model)
    exact, rounded = steps.values()
    assert exact["metrics"]["loss"] == rounded["metrics"]["loss"]
    before, wanted, got = (
        torch.cat([t.float().flatten() for t in each.values()])
        for each in (exact["weights"], exact["after"], rounded["after"])
    )
    assert 0 < relative(got, wanted, wanted - before) < 0.05
