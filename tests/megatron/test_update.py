"""Gradients are scaled, and shared out, as Megatron does it, in fewer passes over memory."""

import pytest
import torch

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize("count", [1, 3])
def test_one_norm_of_many_is_megatrons(ranks, count):
    (told,) = ranks.run("tests.megatron.wait_jobs:norms", count=count)
    assert told["one"] == told["megatron"] and told["reads"] == 0


@pytest.mark.parametrize("count", [0, 3])
def test_all_are_scaled_as_by_megatron(ranks, count):
    (told,) = ranks.run("tests.megatron.wait_jobs:scaled", count=count)
    for found in (told["over"], told["into"]):
        torch.testing.assert_close(found, told["megatron"], rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_shares_out_nothing(ranks, world):
    for told in ranks.run("tests.megatron.wait_jobs:exchanges", world=world):
        assert told == dict.fromkeys(("gradients", "weights"), world - 1)
