"""Rows that move between data-parallel ranks: the same rows, better spread."""

import pytest
import torch
import torch.distributed as dist

from aligner.rollout.balance import Balancer
from aligner.types import PolicyTargets, TrainBatch
from tests.tiny import LLAMA

pytestmark = pytest.mark.multirank


def shares(world):
    """Rank 0 has the long rows."""
    lengths = torch.arange(4 * world, 0, -1) * 3
    width = int(lengths.max())
    tokens = (torch.arange(width)[None] < lengths[:, None]) * (1 + torch.arange(len(lengths))[:, None])
    routing = (tokens * 40)[:, :, None, None].expand(-1, -1, 2, 3).to(torch.int16)
    full = TrainBatch(tokens, lengths, (tokens > 0).float(), [PolicyTargets(tokens * 0.5)], routing=routing)
    return [full.select(torch.arange(4 * r, 4 * r + 4)).trim() for r in range(world)], full


def balanced(shares, on):
    """What a rank has of the rows that are dealt anew."""
    balancer = Balancer(LLAMA, dist.group.WORLD, on)
    return balancer(shares[dist.get_rank()]), balancer.metrics()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("on", [True, False])
def test_rows_are_dealt_by_cost_with_all_their_fields(ranks, world, on):
    own, full = shares(world)
    results = ranks.run(balanced, world=world, shares=own, on=on)
    numbers = torch.cat([batch.tokens[:, 0] - 1 for batch, _ in results])
    assert sorted(numbers.tolist()) == list(range(4 * world))
    for batch, metrics in results:
        assert len(batch.lengths) == 4
        wanted = full.select(batch.tokens[:, 0] - 1)
        for name, tensor in batch.tensors().items():
            want = wanted.tensors()[name]
            assert torch.equal(tensor, want[:, : tensor.shape[1]] if tensor.dim() >= 2 else want), name
        assert metrics == results[0][1]
        if world == 1:
            assert metrics["batch/balance"] == 1
        elif on:
            assert metrics["batch/balance"] > 0.95 > metrics["batch/balance_before"]
        else:
            assert metrics["batch/balance"] == metrics["batch/balance_before"] < 0.8
    if world > 1 and not on:
        assert numbers.tolist() == list(range(4 * world))
