"""A teacher of another layout than its student's, on the same ranks, or one of several: what it says of a row is the
same."""

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.parallel import ParallelConfig

pytestmark = pytest.mark.multirank
ONE, TP2, PP2, CP2 = ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(context=2)
OTHERS = [(ONE, TP2), (TP2, ONE), (ONE, PP2), (PP2, TP2), (CP2, TP2)]


@pytest.mark.few(2)
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("own, theirs", OTHERS)
def test_a_teacher_of_another_layout_says_the_same(ranks, own, theirs, top_k):
    base = ranks.run("tests.roles.jobs:told", world=1, own=ONE, theirs=ONE, top_k=top_k)[0]
    found = ranks.run("tests.roles.jobs:told", world=2, own=own, theirs=theirs, top_k=top_k)
    assert set().union(*(out["rows"] for out in found)) == set(range(7))
    for out in found:
        for row, parts in out["rows"].items():
            torch.testing.assert_close(parts, base["rows"][row], atol=1e-4, rtol=1e-4)
    heads = [next(out["head"] for out in found if out["tp"] == rank) for rank in range(own.tensor)]
    assert torch.equal(torch.cat(heads), base["head"])


@pytest.mark.few(2)
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("own, theirs", [(ONE, ONE), (ONE, TP2), (TP2, ONE), (PP2, PP2)])
def test_several_teachers_say_of_their_rows_what_each_says_alone(ranks, own, theirs, top_k):
    """And the student learns the same from them in any layout and any micro-batches."""
    whole, small = BatchConfig(micro_batch_samples=7), BatchConfig(logprob_tokens=16, micro_batch_samples=1)
    base = ranks.run("tests.roles.jobs:told_by_two", world=1, own=ONE, theirs=ONE, top_k=top_k, batch_cfg=whole)[0]
    found = ranks.run("tests.roles.jobs:told_by_two", world=2, own=own, theirs=theirs, top_k=top_k, batch_cfg=small)
    assert set().union(*(out["rows"] for out in found)) == set(range(7))
    for out in [base, *found]:
        assert out["stats"] == pytest.approx(base["stats"], rel=1e-4)
        for row, parts in out["rows"].items():
            for (told, alone), (same, _) in zip(parts, base["rows"][row], strict=True):
                torch.testing.assert_close(told, alone, atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(told, same, atol=1e-4, rtol=1e-4)
