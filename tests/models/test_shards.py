"""Copies of many views: as one where they lie at equal distances."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.models.shards import joined


@given(st.data())
def test_joined_copies_write_the_same(data):
    """Rows of two matrices, in pieces of some widths: of neighbours, of others, in any order."""
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    source, ours, theirs = torch.randn(8, 12), torch.zeros(9, 16), torch.zeros(9, 16)
    places = st.tuples(st.integers(0, 7), st.integers(0, 12 - width))
    at = data.draw(st.lists(places, min_size=rows, max_size=rows))
    regular = data.draw(st.booleans())
    if regular:
        at = [(row, at[0][1]) for row in range(rows)]

    def pairs(target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(target[i, 1 : 1 + width], source[row, a : a + width]) for i, (row, a) in enumerate(at)]

    for target, piece in pairs(theirs):
        target.copy_(piece)
    fewer = joined(pairs(ours))
    for target, piece in fewer:
        target.copy_(piece)
    assert torch.equal(ours, theirs) and len(fewer) <= len(at)
    assert not regular or len(fewer) == 1
