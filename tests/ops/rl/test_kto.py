"""KTO's loss against a loop of float64, which answers are mismatched, and where it meets the losses of pairs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.config.sections.kto import KtoConfig
from aligner.config.sections.preference import PreferenceConfig
from aligner.ops.rl.kto import above, log_ratios, mismatched, sample_losses
from aligner.ops.rl.preference import Labels, measure, pair_losses

B, T = 6, 7


def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logprobs, reference, mask with holes, float64."""
    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(B, T, generator=g) < 0.6).double()
    mask[:, 0], mask[:, -1] = 0, 1
    logprobs = -2 * torch.rand(B, T, generator=g, dtype=torch.float64)
    return logprobs, logprobs + torch.randn(B, T, generator=g, dtype=torch.float64), mask


def test_every_sample_has_the_nearest_earlier_answer_to_another_prompt():
    assert mismatched("aabcca") == [4, 4, 1, 2, 2, 4]
    assert mismatched("ab") == [1, 0]
    assert mismatched("aaa") is None and mismatched("a") is None and mismatched("") is None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_by_looking_at_all_samples_before_it(prompts):
    count = len(prompts)
    expected = [
        next(((i - back) % count for back in range(1, count) if prompts[(i - back) % count] != prompts[i]), None)
        for i in range(count)
    ]
    assert mismatched(prompts) == (None if None in expected else expected)
    assert None not in expected or set(expected) == {None}  # of one prompt, all samples lack one


@pytest.mark.parametrize("z0", [0.0, 0.7])
def test_losses_and_gradients_are_those_of_a_loop(z0):
    logprobs, reference, mask = make()
    c, desirable = KtoConfig(beta=0.4, desirable_weight=1.2, undesirable_weight=0.7), torch.tensor([1.0, 0, 0, 1, 0, 1])
    logprobs.requires_grad_()
    ratios = log_ratios(logprobs, reference, mask)
    losses = sample_losses(ratios, desirable.double(), z0, c)
    gradient, logprobs = torch.autograd.grad(losses.sum(), logprobs)[0], logprobs.detach()
    for i in range(B):
        d = sum(float(logprobs[i, t] - reference[i, t]) for t in range(T) if mask[i, t])
        weight, sign = (1.2, 1) if desirable[i] else (0.7, -1)
        s = 1 / (1 + math.exp(-sign * 0.4 * (d - z0)))
        assert float(losses[i].detach()) == pytest.approx(weight * (1 - s), rel=1e-12)
        slope = -weight * sign * 0.4 * s * (1 - s)
        torch.testing.assert_close(gradient[i], slope * mask[i])
    far = sample_losses(torch.tensor([1e4, -1e4]), torch.ones(2), 0.0, c)
    assert far[0] == 0 and far[1] == pytest.approx(1.2)


def test_what_the_mask_leaves_out_does_not_count():
    logprobs, reference, mask = make()
    holes = torch.where(mask.bool(), logprobs, torch.nan)
    torch.testing.assert_close(log_ratios(holes, reference, mask), log_ratios(logprobs, reference, mask))


def test_without_a_zero_point_two_answers_are_a_pair_of_apo_zero():
    """arXiv:2408.06266: twice the mean over the two answers."""
    logprobs, reference, mask = (x.float() for x in make())
    desirable = torch.tensor([1.0, 0.0] * (B // 2))
    own = sample_losses(log_ratios(logprobs, reference, mask), desirable, 0.0, KtoConfig(beta=0.3, kl="none"))
    c = PreferenceConfig(loss=["apo_zero"], beta=0.3)
    pairs = pair_losses(measure(logprobs, reference, mask), Labels.of(torch.zeros(B, 3), c), c)["apo_zero"]
    torch.testing.assert_close(2 * own.view(-1, 2).mean(1), pairs, rtol=1e-6, atol=1e-6)


def test_the_share_of_couples_in_order():
    g = torch.Generator().manual_seed(1)
    chosen, rejected = (torch.randint(0, 4, (n,), generator=g).double() for n in (7, 5))  # with ties
    expected = sum((float(c > r) + 0.5 * float(c == r)) for c in chosen for r in rejected) / 35
    assert above(chosen, rejected) == pytest.approx(expected)
    assert math.isnan(above(chosen, torch.zeros(0))) and math.isnan(above(torch.zeros(0), rejected))
