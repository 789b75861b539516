"""From rows to micro-batches."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.parallel import ParallelConfig
from tests.tiny import LLAMA, batch

pytestmark = pytest.mark.multirank


@settings(deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda unit: st.tuples(
            st.just(unit),
            st.lists(st.lists(st.integers(1, 60), min_size=unit, max_size=unit), min_size=1, max_size=20),
            st.integers(1, 200),
        )
    )
)
def test_rows_by_tokens(case):
    from aligner.roles.batching import rows_by_tokens

    unit, units, budget = case
    lengths = torch.tensor(units).view(-1)
    parts = rows_by_tokens(lengths, budget, unit)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
    widest = []
    for part in parts:
        assert len(part)
        for pack in part.view(-1, unit).tolist():  # units stay together, in order
            assert pack[0] % unit == 0 and pack == list(range(pack[0], pack[0] + unit))
        width = int(lengths[part].max())
        assert len(part) == unit or len(part) * width <= budget
        widest.append(width)
    assert widest == sorted(widest, reverse=True)
    for part, following in pairwise(parts):  # no part could have taken the next unit
        assert (len(part) + unit) * int(lengths[part].max()) > budget
        assert int(lengths[following].max()) <= int(lengths[part].max())


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("bc", [BatchConfig(micro_batch_samples=3), BatchConfig(micro_batch_tokens=40)])
def test_micro_batches_hold_every_row_once_with_all_its_fields(unit, bc):
    from aligner.roles.batching import micro_batches

    rows = batch(LLAMA)
    rows = replace(rows, labels=torch.arange(8).float())
    parts = micro_batches(rows, bc, unit)
    seen = torch.cat([p.labels for p in parts]).long()
    assert sorted(seen.tolist()) == list(range(8))
    for name in ("tokens", "lengths", "loss_mask"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(rows, name)[seen])
    if not bc.micro_batch_tokens:
        assert [len(p.lengths) for p in parts] == ([3, 3, 2] if unit == 1 else [6, 2])


@pytest.mark.parametrize(
    "world, parallel",
    [(1, ParallelConfig()), (2, ParallelConfig(pipeline=2)), (2, ParallelConfig(tensor=2, sequence=True))],
)
@pytest.mark.parametrize("budget", [1, 31, 10_000])
def test_forward_keeps_the_order_of_rows_on_every_rank(ranks, world, parallel, budget):
    rows = batch(LLAMA)
    for got in ranks.run("tests.roles.jobs:order", world=world, cfg=LLAMA, parallel=parallel, rows=rows, budget=budget):
        assert got.dtype == torch.float32 and torch.equal(got, rows.tokens.float() * 10)


@pytest.mark.parametrize("world, parallel", [(1, ParallelConfig()), (2, ParallelConfig(pipeline=2))])
def test_a_rank_without_rows(ranks, world, parallel):
    assert ranks.run("tests.roles.jobs:no_rows", world=world, cfg=LLAMA, parallel=parallel) == [[0, 13]] * world


def test_data_parallel_ranks_have_equally_many_packed_micro_batches(ranks):
    """One rank's rows are long: the other cuts its short ones into as many parts."""
    rows = [replace(batch(LLAMA, width=13), lengths=torch.tensor(lengths)) for lengths in ([13] * 8, [3] * 7 + [4])]
    sizes = ranks.run("tests.roles.jobs:micro_batch_sizes", world=2, shares=rows, budget=30)
    assert len(sizes[0]) == len(sizes[1]) == 4
    assert all(sum(part) <= 30 for rank in sizes for part in rank)
    assert [len(part) for part in sizes[1]] == [2, 2, 2, 2]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 4))
def test_packed_rows_fill_the_budget_evenly(lengths, budget, at_least):
    from aligner.roles.batching import packed_rows

    parts = packed_rows(torch.tensor(lengths), budget, at_least=at_least)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
    assert len(parts) >= min(at_least, len(lengths))
    sums = [sum(lengths[i] for i in part.tolist()) for part in parts]
    assert max(sums) <= max(budget, max(lengths))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
