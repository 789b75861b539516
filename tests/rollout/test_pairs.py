"""Which of a prompt's samples make its pair."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.rollout.pairs import best_and_worst
from aligner.types import LabelTargets, RolloutBatch

GROUP, T = 4, 5


def rollout(rewards: list[float], valid: list[bool]) -> RolloutBatch:
    """Row i has tokens i + 10; its prompt has two tokens."""
    count = len(rewards)
    lengths = torch.tensor([3 + i % 3 for i in range(count)])
    column = torch.arange(T)[None]
    mask = ((column >= 2) & (column < lengths[:, None])).float()
    token_rewards = torch.zeros(count, T)
    token_rewards[torch.arange(count), lengths - 1] = torch.tensor(rewards)
    return RolloutBatch(
        tokens=(torch.arange(count) + 10)[:, None].expand(count, T) * (column < lengths[:, None]),
        lengths=lengths,
        response_mask=mask,
        rollout_logprobs=torch.zeros(count, T),
        rewards=torch.tensor(rewards),
        valid=torch.tensor(valid),
        group=torch.arange(count) // GROUP + 6,  # of the second data-parallel rank
        finished=torch.ones(count, dtype=torch.bool),
        weight_version=0,
        token_rewards=token_rewards,
        loss_mask=mask * torch.tensor(valid)[:, None],
    )


SAMPLE = st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3).flatmap(lambda n: st.lists(SAMPLE, min_size=n * GROUP, max_size=n * GROUP)))
def test_best_against_worst_of_those_that_count(samples):
    rewards, valid = [list(column) for column in zip(*samples, strict=True)]
    batch = best_and_worst(rollout(rewards, valid), GROUP)
    assert len(batch.lengths) == 2 * len(samples) // GROUP
    for slot in range(len(samples) // GROUP):
        known = [i for i in range(slot * GROUP, (slot + 1) * GROUP) if valid[i]]
        best, worst = (
            max(known, key=lambda i: (rewards[i], -i), default=0),
            min(known, key=lambda i: (rewards[i], i), default=0),
        )
        labels = batch.of(LabelTargets).labels[2 * slot : 2 * slot + 2]
        pair = bool(known) and rewards[best] > rewards[worst]
        assert labels[:, 3].tolist() == [float(pair)] * 2 and labels[:, 2].tolist() == [1, 1]
        if not pair:
            continue
        assert (batch.tokens[2 * slot : 2 * slot + 2, 0] - 10).tolist() == [best, worst]
        assert labels[:, 1].tolist() == [rewards[best], rewards[worst]]
        assert labels[:, 0].tolist() == [rewards[best] - rewards[worst]] * 2
        for row, length in zip(batch.loss_mask[2 * slot : 2 * slot + 2], batch.lengths[2 * slot :], strict=False):
            assert row.nonzero().flatten().tolist() == list(range(2, int(length)))
    assert math.isfinite(float(batch.of(LabelTargets).labels[batch.of(LabelTargets).labels[:, 3] > 0].sum()))
