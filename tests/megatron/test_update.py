"""Gradients are scaled, and shared out, as Megatron does it, in fewer passes over memory."""

from collections import Counter

import pytest
import torch
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.update import norm_of_all, scale_all
from tests.megatron.models import build, nll_loss, shares
from tests.ranks import on_ranks
from tests.tiny import ADAM, LLAMA, batch

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
