import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.ops.packing.balance import balance, deal, row_costs
from tests.tiny import LLAMA

costs_and_parts = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=40).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def largest(costs, parts):
    return max(sum(costs[i] for i in rows) for rows in parts)


@given(costs_and_parts)
def test_every_row_once_in_parts_of_equal_number(case):
    costs, parts = case
    dealt = deal(costs, parts)
    assert sorted(itertools.chain(*dealt)) == list(range(len(costs)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert dealt == deal(costs, parts)


@given(st.lists(st.integers(1, 30), min_size=6, max_size=6))
def test_near_the_best_of_all_ways(costs):
    best = min(
        max(sum(costs[i] for i in half), sum(costs) - sum(costs[i] for i in half))
        for half in itertools.combinations(range(6), 3)
    )
    assert largest(costs, deal(costs, 2)) <= 7 / 6 * best


def first_fit(costs, parts):
    """What is in use elsewhere: rows in their order, each to the first part with room for it."""
    limit = sum(costs) / parts
    dealt, loads = [[] for _ in range(parts)], [0.0] * parts
    for i, cost in enumerate(costs):
        to = next((p for p in range(parts) if loads[p] + cost <= limit), loads.index(min(loads)))
        dealt[to].append(i)
        loads[to] += cost
    return dealt


def test_better_than_first_fit_and_than_dealing_in_turn():
    g = torch.Generator().manual_seed(0)
    for parts in (2, 4, 8):
        for _ in range(5):
            lengths = (torch.rand(64, generator=g).pow(3) * 2000).long() + 10  # long-tailed
            costs = row_costs(lengths, LLAMA).tolist()
            ours = largest(costs, deal(costs, parts))
            assert ours <= largest(costs, first_fit(costs, parts))
            assert ours <= 1.1 * max(sum(costs) / parts, max(costs))
            assert ours < largest(costs, [list(range(p, 64, parts)) for p in range(parts)])


def test_balance_is_the_mean_over_the_largest():
    assert balance([1, 2, 3], [[0, 1], [2]]) == 1
    assert balance([1, 1, 4], [[0, 1], [2]]) == 0.75


def test_costs_count_the_operations_of_a_row():
    """Twice the length: twice the matrix products, four times the attention."""
    one, two = (float(row_costs(torch.tensor([n]), LLAMA)) for n in (100, 200))
    attention = 2 * LLAMA.num_heads * LLAMA.kv_channels * 100**2
    assert abs(two - (2 * (one - attention) + 4 * attention)) < 1e-6 * two
