"""Means over spans with the same number in their rows (`aligner/ops/rl/spans.py`)."""

import torch

from aligner.ops.rl.spans import means_of_numbers


def test_means_are_over_elements_with_the_same_number():
    numbers = torch.tensor([[0, 1, 0, 2, 5], [1, 2, 0, 0, 0]])
    x = torch.tensor([[9.0, 1.0, 9.0, 4.0, 7.0], [3.0, -2.0, 9.0, 9.0, 9.0]])
    expected = torch.tensor([[0.0, 2.0, 0.0, 1.0, 7.0], [2.0, 1.0, 0.0, 0.0, 0.0]])
    assert torch.equal(means_of_numbers(x, numbers, None), expected)
    assert not means_of_numbers(x, torch.zeros_like(numbers), None).any()
