"""How old the tokens of a rollout are, against a loop."""

import pytest
import torch

from aligner.rollout.statistics import staleness_metrics
from aligner.types import RolloutBatch


def batch(lengths, prompt=2, seed=0) -> RolloutBatch:
    g, width = torch.Generator().manual_seed(seed), prompt + max(lengths)
    lengths, column = torch.tensor(lengths), torch.arange(width)
    on = (column >= prompt) & (column < prompt + lengths[:, None])
    shape = on.shape
    return RolloutBatch(
        tokens=torch.zeros(shape, dtype=torch.int64),
        lengths=lengths + prompt,
        response_mask=on.float(),
        rollout_logprobs=torch.zeros(shape),
        rewards=torch.zeros(len(lengths)),
        valid=torch.ones(len(lengths), dtype=torch.bool),
        group=torch.arange(len(lengths)),
        finished=torch.ones(len(lengths), dtype=torch.bool),
        weight_version=3,
        versions=torch.where(on, torch.randint(3, 9, shape, generator=g), 0),
    )


def test_of_one_version_it_is_the_version():
    rollout = batch([3, 1])
    rollout.versions = None
    assert staleness_metrics(rollout, 7, None) == {"staleness/mean": 4.0, "staleness/max": 4.0}


def test_of_tokens_it_is_the_loop():
    lengths = [5, 2, 9, 2, 7, 7, 1, 30, 4]  # nine: 3, 2, 2, 2 in the quarters; samples of equal length in their order
    rollout = batch(lengths)
    ages = [[8 - int(rollout.versions[i, 2 + t]) for t in range(n)] for i, n in enumerate(lengths)]
    tokens = [a for row in ages for a in row]
    order = sorted(range(9), key=lambda i: lengths[i])
    wanted = {
        "staleness/mean": sum(tokens) / len(tokens),
        "staleness/max": max(tokens),
        "staleness/oldest_mean": sum(max(row) for row in ages) / 9,
    }
    for quarter, places in enumerate([(0, 1, 2), (3, 4), (5, 6), (7, 8)], 1):
        piece = [a for location in places for a in ages[order[location]]]
        wanted[f"staleness/q{quarter}_mean"] = sum(piece) / len(piece)
    assert staleness_metrics(rollout, 8, None) == pytest.approx(wanted, rel=1e-12)
