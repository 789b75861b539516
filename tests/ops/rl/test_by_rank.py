"""The rows that sort, against loops of float64 over a whole minibatch with autograd through the sort."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.preference import BY_RANK, PreferenceConfig
from aligner.ops.rl.by_rank import at_rank, with_partners
from aligner.ops.rl.preference import Labels, measure, pair_losses
from aligner.types import LabelTargets, TrainBatch

PAIRS, T = 7, 6
SETTINGS = [{}, {"label_smoothing": 0.2}, {"length": "mean", "beta": 3.0}, {"ld_alpha": 0.3}]


def make(seed: int = 0) -> tuple[TrainBatch, Tensor]:
    """A minibatch with reference, and the policy's logprobs, float64."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(2 * PAIRS, T, generator=g) < 0.6).float()
    mask[:, 0], mask[:, -1] = 0, 1
    reference = -3 * torch.rand(2 * PAIRS, T, generator=g, dtype=torch.float64)
    logprobs = reference + torch.randn(2 * PAIRS, T, generator=g, dtype=torch.float64)
    known = LabelTargets(torch.rand(2 * PAIRS, 3, generator=g, dtype=torch.float64), reference)
    batch = TrainBatch(torch.zeros(2 * PAIRS, T, dtype=torch.int64), torch.full((2 * PAIRS,), T), mask, [known])
    return batch, logprobs


def textbook(name: str, c: PreferenceConfig, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """The mean over ranks; the gradient goes through torch.sort."""
    sums = {"policy": [], "reference": []}
    for row in range(len(mask)):
        count = [int(mask[r].sum()) for r in (row - row % 2, row - row % 2 + 1)]
        for side, of in (("policy", logprobs), ("reference", reference)):
            seen, total = 0, torch.zeros((), dtype=torch.float64)
            for t in range(mask.shape[1]):
                if mask[row, t]:
                    seen += 1
                    total = total + (c.ld_alpha if seen > min(count) else 1.0) * of[row, t]
            sums[side].append(total / (count[row % 2] if c.length == "mean" else 1))
    s, r = torch.stack(sums["policy"]), torch.stack(sums["reference"])
    if name == "aot":
        left, right = s[0::2] - s[1::2], r[0::2] - r[1::2]
    else:
        left, right = (s - r)[0::2], (s - r)[1::2]
    z, e = c.beta * (torch.sort(left).values - torch.sort(right).values), c.label_smoothing
    return ((1 - e) * torch.log1p(torch.exp(-z)) + e * torch.log1p(torch.exp(z))).mean()


def measured(c: PreferenceConfig, batch: TrainBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The first loss and its gradient, pair by pair."""
    own = logprobs.clone().requires_grad_()
    labels = Labels.of(with_partners(batch, logprobs, c, None), c)
    value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(logprobs)
    for pair in range(len(logprobs) // 2):
        rows, one = slice(2 * pair, 2 * pair + 2), slice(pair, pair + 1)
        partners = type(labels.partners)(*(x[one] for x in labels.partners))
        of = Labels(*(x[one] for x in labels[:4]), partners)
        answers = measure(own[rows], batch.of(LabelTargets).ref_logprobs[rows], batch.loss_mask[rows], c.ld_alpha)
        each = pair_losses(answers, of, c)[c.loss[0]].sum() / (len(logprobs) // 2)
        value, gradient = value + each.detach(), gradient + torch.autograd.grad(each, own)[0]
    return value, gradient


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", BY_RANK)
def test_pairs_one_by_one_add_up_to_the_sorted_minibatch(name, settings):
    c, (batch, logprobs) = PreferenceConfig(loss=[name], **settings), make()
    wanted = logprobs.clone().requires_grad_()
    truth = textbook(name, c, wanted, batch.of(LabelTargets).ref_logprobs, batch.loss_mask)
    gradient = torch.autograd.grad(truth, wanted)[0]
    torch.testing.assert_close(measured(c, batch, logprobs), (truth.detach(), gradient), rtol=1e-9, atol=1e-12)
    apart = pair_losses(
        measure(logprobs, batch.of(LabelTargets).ref_logprobs, batch.loss_mask, c.ld_alpha), *plain(batch, settings)
    )
    assert abs(float(apart["sigmoid"].mean() - truth.detach())) > 1e-3, "data on which the order does not matter"


def plain(batch: TrainBatch, more: dict) -> tuple[Labels, PreferenceConfig]:
    c = PreferenceConfig(**more)
    return Labels.of(batch.of(LabelTargets).labels, c), c


@pytest.mark.parametrize("name", BY_RANK)
def test_where_policy_and_reference_agree_it_is_dpo(name):
    c, (batch, _) = PreferenceConfig(loss=[name]), make()
    value, gradient = measured(c, batch, batch.of(LabelTargets).ref_logprobs)
    assert float(value) == pytest.approx(math.log(2), abs=1e-12)
    signs = torch.tensor([-1.0, 1.0]).repeat(PAIRS)[:, None].double()
    torch.testing.assert_close(gradient, signs * batch.loss_mask * c.beta / 2 / PAIRS)


@pytest.mark.parametrize("name", BY_RANK)
def test_equal_numbers_share_their_ranks(name):
    """Three times the same pair: the value is that of the sort, their gradients together too."""
    c, (batch, logprobs) = PreferenceConfig(loss=[name]), make(1)
    same = torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 6, 7])
    batch, logprobs = batch.select(same), logprobs[same]
    wanted = logprobs.clone().requires_grad_()
    truth = textbook(name, c, wanted, batch.of(LabelTargets).ref_logprobs, batch.loss_mask)
    value, gradient = measured(c, batch, logprobs)
    torch.testing.assert_close(value, truth.detach())
    sums = [x.view(6, 2, T)[[0, 2, 4]].sum(0) for x in (gradient, torch.autograd.grad(truth, wanted)[0])]
    torch.testing.assert_close(*sums)


def test_a_rank_is_that_of_the_smaller_numbers():
    assert at_rank(torch.tensor([5.0, -1.0, 2.0]), torch.tensor([30.0, 10.0, 20.0])).tolist() == [30, 10, 20]
    assert at_rank(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([3.0, 2.0, 1.0])).tolist() == [2, 3, 1]


def shared(pairs: list[int]) -> Tensor:
    """`with_partners` of a rank that has so many of the pairs, after those of the ranks before."""
    batch, logprobs = make()
    rank = dist.get_rank()
    rows = torch.arange(2 * sum(pairs[:rank]), 2 * sum(pairs[: rank + 1]))
    return with_partners(batch.select(rows), logprobs[rows], PreferenceConfig(loss=["aot"]), dist.group.WORLD)


@pytest.mark.multirank
@pytest.mark.parametrize("pairs", [[3, 4], [7, 0]], ids=str)
def test_partners_are_those_of_all_ranks(ranks, pairs):
    batch, logprobs = make()
    whole = with_partners(batch, logprobs, PreferenceConfig(loss=["aot"]), None)
    torch.testing.assert_close(torch.cat(ranks.run("tests.ops.rl.test_by_rank:shared", 2, pairs=pairs)), whole)
