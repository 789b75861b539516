"""A teacher of another layout than its student's, on the same ranks: what it says of a row is the same."""

import pytest
import torch

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
