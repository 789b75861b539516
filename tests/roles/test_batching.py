"""From rows to micro-batches."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.ops.packing.pack import pack
from aligner.roles.batching import batch_metrics, forward_rows, micro_batches
from aligner.roles.policy import Reference
from aligner.types import LabelTargets, TrainBatch
from tests.megatron.models import build
from tests.ranks import on_ranks
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
    for piece in parts:
        assert len(piece)
        for own in piece.view(-1, unit).tolist():  # units stay together, in order
            assert own[0] % unit == 0 and own == list(range(own[0], own[0] + unit))
        width = int(lengths[piece].max())
        assert len(piece) == unit or len(piece) * width <= budget
        widest.append(width)
    assert widest == sorted(widest, reverse=True)
    for piece, following in pairwise(parts):  # no part could have taken the next unit
        assert (len(piece) + unit) * int(lengths[piece].max()) > budget
        assert int(lengths[following].max()) <= int(lengths[piece].max())


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("bc", [BatchConfig(micro_batch_samples=3), BatchConfig(micro_batch_tokens=40)])
def test_micro_batches_hold_every_row_once_with_all_its_fields(unit, bc):
    from aligner.roles.batching import micro_batches

    rows = batch(LLAMA)
    rows = rows.with_payloads(LabelTargets(torch.arange(8).float()))
    parts = micro_batches(rows, bc, unit)
    seen = torch.cat([p.of(LabelTargets).labels for p in parts]).long()
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
@on_ranks()
def test_forward_keeps_the_order_of_rows_on_every_rank(world, parallel, budget):
    """Each position answers with its own token, times ten."""
    rows, share = batch(LLAMA), 2 if parallel.sequence else 1  # of the stream, which is padded to be divisible

    def read(output: torch.Tensor, b: TrainBatch) -> torch.Tensor:
        assert len(output) * share == b.packing.tokens
        assert 0 <= b.packing.tokens - int(b.lengths.sum()) < max(share, b.packing.tokens / 8)
        return b.tokens * 10

    got = forward_rows(build(LLAMA, parallel), rows, BatchConfig(logprob_tokens=budget), read)
    assert got.dtype == torch.float32 and torch.equal(got, rows.tokens.float() * 10)


@pytest.mark.parametrize("world, parallel", [(1, ParallelConfig()), (2, ParallelConfig(pipeline=2))])
@on_ranks()
def test_a_rank_without_rows(world, parallel):
    rows = batch(LLAMA).select(torch.arange(0))
    assert Reference(build(LLAMA, parallel), BatchConfig()).logprobs(rows).shape == (0, 13)


@on_ranks(2)
def test_data_parallel_ranks_have_equally_many_packed_micro_batches():
    """One rank's rows are long: the other cuts its short ones into as many parts."""
    lengths = [3] * 7 + [4] if dist.get_rank() else [13] * 8
    rows = replace(batch(LLAMA, width=13), lengths=torch.tensor(lengths))
    parts = micro_batches(rows, BatchConfig(micro_batch_tokens=30), group=dist.group.WORLD)
    assert [len(piece.lengths) for piece in parts] == [2, 2, 2, 2]
    assert all(piece.lengths.sum() <= 30 for piece in parts)


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 4))
def test_packed_rows_fill_the_budget_evenly(lengths, budget, at_least):
    from aligner.roles.batching import packed_rows

    parts = packed_rows(torch.tensor(lengths), budget, at_least=at_least)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
    assert len(parts) >= min(at_least, len(lengths))
    sums = [sum(lengths[i] for i in piece.tolist()) for piece in parts]
    assert max(sums) <= max(budget, max(lengths))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("packing", [True, False])
def test_metrics_count_what_the_streams_of_all_context_ranks_hold(packing, context):
    """Against the streams themselves, token by token."""
    lengths = torch.tensor([5, 9, 2, 13, 7, 1, 4])
    rows = TrainBatch(torch.zeros(7, 13, dtype=torch.int64), lengths, torch.ones(7, 13))
    cfg = BatchConfig(micro_batch_tokens=20, packing=packing)
    parts = micro_batches(rows, cfg)
    streams = [
        pack(rows.lengths, int(rows.lengths.max()), padded=not packing, context=context, rank=rank)
        for rows in parts
        for rank in range(context)
    ]
    metrics = batch_metrics(parts, cfg, context)
    if packing or context == 1:
        held = sum(stream.tokens for stream in streams)
        assert metrics["batch/padding_fraction"] == pytest.approx(1 - 41 / held, abs=1e-12)
    widths = [int(rows.lengths.max()) * len(rows.lengths) for rows in parts]
    filled = [41] if packing else widths
    assert metrics["batch/packing_efficiency"] == pytest.approx(sum(filled) / (20 * len(parts)))
    assert metrics["batch/micro_batch_rows"] == 7 / len(parts) == 7 / metrics["batch/micro_batches"]
    assert "batch/packing_efficiency" not in batch_metrics(parts, BatchConfig(), context)
