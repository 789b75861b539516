"""Messages between ranks: tensors come back as they were, and are not in the pickle."""

import pickle

import pytest
import torch
import torch.distributed as dist

from aligner.ops.reduce import dealt, gathered_messages, packed, unpacked

VALUES = [
    None,
    {"a": [torch.arange(5, dtype=torch.int16), torch.tensor(2.5)], "b": (1, "x", torch.arange(6).view(2, 3).t())},
    [torch.zeros(0, 3, dtype=torch.uint8), torch.arange(3) < 1],
]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("value", VALUES, ids=["none", "tensors", "empty"])
def test_values_come_back_as_they_were(value):
    assert same(unpacked(packed(value)), value)


def test_the_bytes_of_a_tensor_are_sent_once_and_nothing_of_its_storage():
    whole = torch.zeros(1 << 20, dtype=torch.uint8)
    assert len(packed([whole[:100]])) < 100 + 300 < len(pickle.dumps([whole[:100]]))


def exchanged(values: list) -> tuple:
    """What each rank gets where each has another number of tensors for each."""
    rank, group = dist.get_rank(), dist.group.WORLD
    return gathered_messages(values[rank], group), dealt([[values[to], rank] for to in range(2)], group)


@pytest.mark.multirank
def test_ranks_exchange_them(ranks):
    for rank, (everyone, received) in enumerate(ranks.run(exchanged, world=2, values=VALUES[1:])):
        assert same(everyone, VALUES[1:])
        assert same(received, [[VALUES[1 + rank], 0], [VALUES[1 + rank], 1]])
