import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.data.collate import collate_preference, collate_scored, collate_sft
from aligner.data.items import PreferenceItem, ScoredItem, SftItem
from aligner.types import LabelTargets

ROWS = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=9), min_size=1, max_size=6)


def slow_pad(rows, fill):
    width = max(len(row) for row in rows)
    return [list(row) + [fill] * (width - len(row)) for row in rows]


@given(rows=ROWS)
def test_sft_against_a_loop(rows):
    masks = [[t % 2 for t in row] for row in rows]
    items = [SftItem(np.asarray(r, np.int32), np.asarray(m, np.uint8)) for r, m in zip(rows, masks, strict=True)]
    batch = collate_sft(items, 99)
    assert batch.tokens.tolist() == slow_pad(rows, 99)
    assert batch.loss_mask.tolist() == slow_pad(masks, 0)
    assert batch.lengths.tolist() == [len(row) for row in rows]
    assert (batch.tokens.dtype, batch.lengths.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)


@given(chosen=ROWS, seed=st.integers(0, 9))
def test_preference_against_a_loop(chosen, seed):
    items = [PreferenceItem(row, [*row[::-1], seed], 0.5 * i) for i, row in enumerate(chosen)]
    batch = collate_preference(items, 99)
    texts = [text for item in items for text in (item.chosen, item.rejected)]
    assert batch.tokens.tolist() == slow_pad(texts, 99)
    assert batch.of(LabelTargets).labels.tolist() == [item.margin for item in items for _ in range(2)]
    for row, mask in zip(texts, batch.loss_mask.tolist(), strict=True):
        assert [i for i, m in enumerate(mask) if m] == [len(row) - 1]
    assert batch.loss_mask.dtype == batch.of(LabelTargets).labels.dtype == torch.float32


def test_scored_rows_are_padded_and_learned_at_their_last_token():
    batch = collate_scored([ScoredItem([1, 2, 3], [0.5, 1.0]), ScoredItem([4], [2.0, 3.0])], 0)
    assert batch.tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.of(LabelTargets).labels.tolist() == [[0.5, 1.0], [2.0, 3.0]]
    assert batch.loss_mask.tolist() == [[0, 0, 1], [1, 0, 0]]
