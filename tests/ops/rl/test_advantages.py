"""Each estimator of whole samples against a loop in float64, written from its definition."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops.rl import advantages as adv

EPS = 1e-6


def mean_of_others(i, s):
    return s[i] - statistics.fmean(s[:i] + s[i + 1 :])


def best_by(i, s):
    first, second = sorted(s, reverse=True)[:2]
    return first - second if s.index(first) == i else 0.0


# name -> f(i, scores of the valid samples of the group, their lengths): the advantage of the i-th
LOOPS = {
    "grpo": lambda i, s, n: (s[i] - statistics.fmean(s)) / (statistics.stdev(s) + EPS),
    "grpo_eps": lambda i, s, n: (s[i] - statistics.fmean(s)) / (statistics.stdev(s) + 1e-4),
    "dr_grpo": lambda i, s, n: s[i] - statistics.fmean(s),
    "rloo": lambda i, s, n: mean_of_others(i, s),
    "opo": lambda i, s, n: s[i] - math.fsum(a * b for a, b in zip(n, s, strict=True)) / sum(n),
    "maxrl": lambda i, s, n: s[i] / statistics.fmean(s) - 1 if statistics.fmean(s) > 0 else 0.0,
    "pass_at_k": lambda i, s, n: best_by(i, s),
    "pass_at_k_std": lambda i, s, n: best_by(i, s) / (statistics.stdev(s) + EPS),
}
OURS = {
    "grpo": lambda s, g, v, n: adv.grpo(s, g, v),
    "grpo_eps": lambda s, g, v, n: adv.grpo(s, g, v, 1e-4),
    "dr_grpo": lambda s, g, v, n: adv.dr_grpo(s, g, v),
    "rloo": lambda s, g, v, n: adv.rloo(s, g, v),
    "opo": lambda s, g, v, n: adv.opo(s, g, v, n),
    "maxrl": lambda s, g, v, n: adv.maxrl(s, g, v),
    "pass_at_k": lambda s, g, v, n: adv.pass_at_k(s, g, v),
    "pass_at_k_std": lambda s, g, v, n: adv.pass_at_k(s, g, v, by_std=True),
}


def groups_of(group, valid):
    """Row numbers of the valid samples, group by group."""
    return [[i for i in range(len(group)) if group[i] == g and valid[i]] for g in sorted(set(group))]


def group_loop(name, scores, group, valid, lengths):
    out = [0.0] * len(scores)
    for rows in groups_of(group, valid):
        s, n = [scores[i] for i in rows], [lengths[i] for i in rows]
        if len(set(s)) > 1:
            for i, row in enumerate(rows):
                out[row] = LOOPS[name](i, s, n)
    return out


SCORES = [0.0, 1.0, 0.1, -2.5, 0.3, 1e3]
samples = st.lists(
    st.tuples(st.sampled_from(SCORES), st.sampled_from([7, 8, 1000, 3]), st.booleans(), st.integers(1, 9)),
    min_size=1,
    max_size=20,
)


def columns(rows):
    """(scores float32 with NaN where invalid, group, valid, lengths) and the same as lists."""
    scores, group, valid, lengths = map(list, zip(*rows, strict=True))
    s = torch.tensor(scores)
    plain = s.tolist(), group, valid, lengths
    s[~torch.tensor(valid)] = math.nan
    return (s, torch.tensor(group), torch.tensor(valid), torch.tensor(lengths)), plain


def check(got, want):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=1e-5)
    assert all(float(g) == 0 for g, w in zip(got, want, strict=True) if w == 0)


@settings(max_examples=60, deadline=None)
@given(rows=samples)
@pytest.mark.parametrize("name", LOOPS)
def test_group_estimators_equal_a_loop(name, rows):
    ours, plain = columns(rows)
    check(OURS[name](*ours), group_loop(name, *plain))


@settings(max_examples=40, deadline=None)
@given(rows=samples, seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "pass_at_k_std"])
def test_the_order_of_rows_and_the_labels_of_groups_do_not_matter(name, rows, seed):
    (s, g, v, n), _ = columns(rows)
    order = torch.randperm(len(s), generator=torch.Generator().manual_seed(seed))
    if name.startswith("pass"):
        s = torch.where(v, s + 0.01 * torch.arange(len(s)), s)  # of equal best samples the first is taken: none here
    a, b = OURS[name](s, g, v, n), OURS[name](s[order], 5 - g[order], v[order], n[order])
    torch.testing.assert_close(a[order], b)


@settings(max_examples=60, deadline=None)
@given(rows=samples)
def test_learnable_and_degenerate_groups(rows):
    (s, g, v, _), (scores, group, valid, _) = columns(rows)
    distinct = {h: len({x for x, k, ok in zip(scores, group, valid, strict=True) if k == h and ok}) for h in set(group)}
    degenerate, total = adv.count_degenerate(s, g, v)
    assert (degenerate, total) == (sum(d < 2 for d in distinct.values()), len(distinct))
    assert adv.learnable(s, g, v).tolist() == [ok and distinct[h] > 1 for h, ok in zip(group, valid, strict=True)]


def test_maxrl_weighs_a_prompt_by_its_pass_rate():
    """With rewards of 0 and 1 right responses add up to n - k of n, for any number k of them; without one, 0."""
    for right in range(1, 8):
        scores = torch.tensor([1.0] * right + [0.0] * (8 - right))
        advantages = adv.maxrl(scores, torch.zeros(8).long(), torch.ones(8).bool())
        torch.testing.assert_close(advantages[:right], torch.full((right,), 8 / right - 1))
        torch.testing.assert_close(advantages[right:], torch.full((8 - right,), -1.0))
    assert (adv.maxrl(torch.tensor([0.0, -1.0]), torch.zeros(2).long(), torch.ones(2).bool()) == 0).all()


def test_equal_scores_whose_mean_rounds_are_still_degenerate():
    scores, group, valid = torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3).long(), torch.ones(3).bool()
    for f in OURS.values():
        assert (f(scores, group, valid, torch.ones(3)) == 0).all()


def test_group_mean_std():
    s = torch.tensor([1.0, 2.0, 4.0, 9.0, math.nan])
    mean, std, n = adv.group_mean_std(s, torch.tensor([5, 5, 5, 2, 2]), torch.tensor([True, True, True, True, False]))
    assert mean.tolist() == pytest.approx([7 / 3] * 3 + [9, 9])
    assert std.tolist() == pytest.approx([statistics.stdev([1, 2, 4])] * 3 + [0, 0])
    assert n.tolist() == [3, 3, 3, 1, 1]


@settings(max_examples=60, deadline=None)
@given(rows=samples)
def test_gpg_makes_up_for_groups_without_gradient(rows):
    ours, plain = columns(rows)
    some = [r for r in groups_of(*plain[1:3]) if r]
    left = [r for r in some if len({plain[0][i] for i in r}) > 1]
    factor = len(some) / max(1, len(left))
    check(adv.gpg(*ours[:3]), [a * factor for a in group_loop("dr_grpo", *plain)])


@settings(max_examples=60, deadline=None)
@given(rows=samples, known=st.lists(st.booleans(), min_size=20, max_size=20), weight=st.sampled_from([1.0, 0.5, 0.0]))
def test_gdpo(rows, known, weight):
    _, (scores, group, valid, lengths) = columns(rows)
    second = [float(n) if k else math.nan for n, k in zip(lengths, known, strict=False)]
    table = torch.tensor([scores, second], dtype=torch.float64).T
    both = [v and not math.isnan(x) for v, x in zip(valid, second, strict=True)]
    parts = [group_loop("grpo", x, group, ok, lengths) for x, ok in ((scores, valid), (second, both))]
    x = [a + weight * b for a, b in zip(*parts, strict=True)]
    learns = [False] * len(x)
    for column, ok in ((scores, valid), (second, both)):
        for g in set(group):
            varied = len({column[i] for i in range(len(x)) if group[i] == g and ok[i]}) > 1
            learns = [was or (varied and group[i] == g) for i, was in enumerate(learns)]
    inside = [a for a, ok in zip(x, valid, strict=True) if ok]
    mean, std = (statistics.fmean(inside), statistics.stdev(inside)) if len(inside) > 1 else (sum(inside), 0.0)
    want = [(a - mean) / (std + 1e-4) if ok and v else 0.0 for a, ok, v in zip(x, learns, valid, strict=True)]
    check(adv.gdpo(table, [1.0, weight], torch.tensor(group), torch.tensor(valid)), want)


def test_gdpo_of_one_component_is_grpo_with_unit_scale():
    s, group = torch.randn(24, dtype=torch.float64), torch.arange(6).repeat_interleave(4)
    valid = torch.ones(24).bool()
    ours, grpo = adv.gdpo(s[:, None], [3.0], group, valid).double(), adv.grpo(s, group, valid).double()
    torch.testing.assert_close(ours, grpo / grpo.std(), atol=1e-3, rtol=1e-3)


def test_remax_compares_with_the_greedy_response():
    s = torch.tensor([1.0, 1.0, 2.0, math.nan, 3.0])
    greedy, valid = torch.tensor([0.5, 0.5, 2.0, 0.0, math.nan]), torch.tensor([True, True, True, False, True])
    assert adv.remax(s, greedy, valid).tolist() == [0.5, 0.5, 0, 0, 0]


def test_nothing_is_not_an_error():
    empty = torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).bool(), torch.zeros(0)
    assert all(len(f(*empty)) == 0 for f in OURS.values())
    assert len(adv.gpg(*empty[:3])) == 0 and len(adv.gdpo(torch.zeros(0, 2), [1.0, 1.0], *empty[1:3])) == 0
