"""What nobody reads is left out of a stream, and nothing else: every token that is read sees what it saw before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops.packing.needed import last_tokens, narrowed, predicting, without_unread
from aligner.ops.packing.pack import pack

TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=12)
ROWS = st.lists(st.tuples(st.integers(0, 30), TOKENS), min_size=1, max_size=9)


def made(rows, extra: int, padded: bool, multiple: int, share: bool):
    """Prompts of many tokens that rows have in common, responses of few, and a mask with holes over the responses."""
    texts = [[7] * prompt + response for prompt, response in rows]
    lengths = torch.tensor([len(t) for t in texts])
    width = int(lengths.max()) + extra
    tokens = torch.tensor([t + [0] * (width - len(t)) for t in texts])
    column = torch.arange(width)
    prompts = torch.tensor([prompt for prompt, _ in rows])
    mask = (column >= prompts[:, None]) & (column < lengths[:, None]) & (column % 5 != 3) & (column > 0)
    packing = pack(lengths, width, padded=padded, multiple=multiple, share=tokens if share else None)
    return tokens, lengths, mask, packing


def sights(packing, spans, tokens) -> list[list[tuple[int, int]]]:
    """For each query of `spans`, in the order of their stream: (position, token) of each key that it sees."""
    stream, actual, done = tokens.view(-1)[packing.source], {}, 0
    keys = list(zip(packing.positions.tolist(), stream.tolist(), strict=True))
    for segment in spans.segments:
        queries, width = segment.rows * segment.q_width, segment.k_width
        places = (
            torch.arange(len(stream)).view(segment.rows, -1)
            if segment.k_index is None and spans.q_index is None
            else None
        )
        if places is None:
            index = spans.q_index[done : done + queries] if segment.k_index is None else segment.k_index
            places = index.view(segment.rows, width)
        square = torch.ones(segment.q_width, width, dtype=torch.bool).tril(width - segment.q_width)
        mask = square.expand(segment.rows, -1, -1) if segment.mask is None else segment.mask[:, 0]
        for row in range(segment.rows):
            for i in range(segment.q_width):
                seen = places[row][mask[row, i]].tolist()
                actual[done + row * segment.q_width + i] = [keys[k] for k in seen]
        done += queries
    out = torch.arange(len(stream)) if spans.out_index is None else spans.out_index
    return [actual[cell] for cell in out.tolist()]


@settings(deadline=None, max_examples=150)
@given(ROWS, st.integers(0, 3), st.booleans(), st.sampled_from([1, 2, 3]), st.booleans(), st.sampled_from([1, 4]))
def test_what_is_read_sees_what_it_saw_and_goes_where_it_went(rows, extra, padded, multiple, share, step):
    tokens, _, mask, packing = made(rows, extra, padded, multiple, share)
    wanted = predicting(mask)
    fewer = without_unread(packing, wanted, lambda count: step)
    reported = fewer.predictions(tokens.view(-1)[fewer.targets])
    assert torch.equal(reported * mask, tokens * mask)
    assert len(fewer.targets) < max(1, int(mask.sum())) + step and len(fewer.targets) % step == 0
    narrow = narrowed(fewer, wanted, lambda count: step)
    if narrow.final is None:
        assert narrow is fewer
        return
    kept = narrow.final.kept
    assert 1 <= len(kept) <= 0.9 * packing.tokens and (kept.diff() > 0).all()
    stream = tokens.view(-1)[packing.source]
    outputs = stream[kept]  # a model that answers with its token
    assert torch.equal(narrow.to_rows(outputs, shift=False) * wanted, tokens * wanted)
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
    assert torch.equal(narrow.to_rows(outputs, shift=True) * mask, before * mask)
    assert torch.equal(narrow.predictions(outputs[narrow.outputs]) * mask, before * mask)
    assert torch.equal(narrow.predictions(tokens.view(-1)[narrow.targets]), reported)
    everything = sights(packing, packing, tokens)
    assert sights(packing, narrow.final, tokens) == [everything[i] for i in kept.tolist()]


@settings(deadline=None)
@given(ROWS, st.integers(0, 3))
def test_a_reward_model_reads_one_token_of_a_row(rows, extra):
    tokens, lengths, _, packing = made(rows, extra, False, 1, False)
    wanted = last_tokens(lengths, tokens.shape[1])
    narrow = narrowed(without_unread(packing, wanted), wanted)
    if len(rows) <= 0.9 * int(lengths.sum()):
        assert len(narrow.final.kept) == len(rows)
    source = packing.source if narrow.final is None else packing.source[narrow.final.kept]
    read = narrow.to_rows(tokens.view(-1)[source], shift=False)
    assert torch.equal(read * wanted, tokens * wanted)


def test_tokens_before_the_read_ones_make_their_number_even():
    lengths, column = torch.tensor([6, 2, 9]), torch.arange(9)
    wanted = (column == torch.tensor([[4], [0], [8]])) & (column < lengths[:, None])
    for step, kept in ((2, [3, 4, 6, 16]), (8, [0, 1, 2, 3, 4, 6, 15, 16]), (16, [4, 6, 16])):
        final = narrowed(without_unread(pack(lengths, 9), wanted), wanted, lambda count, step=step: step).final
        assert final.kept.tolist() == kept


def test_where_nothing_is_read_one_token_stays():
    lengths = torch.tensor([5, 3])
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    narrow = narrowed(without_unread(pack(lengths, 5), nothing), nothing)
    assert len(narrow.final.kept) == len(narrow.targets) == len(narrow.outputs) == 1


@pytest.mark.parametrize(
    "begin, lengths, narrows, masked",
    [
        ([2000, 1990], [4000, 3990], True, True),
        ([9000, 8990], [18000, 17980], False, False),
        ([9000, 9000], [18000, 18000], True, False),  # rows that are alike need none
    ],
)
def test_a_mask_that_would_be_large_is_not_made(begin, lengths, narrows, masked):
    begin, lengths = torch.tensor(begin), torch.tensor(lengths)
    column = torch.arange(int(lengths.max()))
    wanted = (column >= begin[:, None]) & (column < lengths[:, None])
    final = narrowed(without_unread(pack(lengths, len(column)), wanted), wanted).final
    assert (final is not None) == narrows
    assert not narrows or [s.mask is not None for s in final.segments] == [masked]


def test_a_long_row_widens_no_short_ones():
    """A reward model has one query a row, whatever its length."""
    lengths = torch.tensor([100] * 81 + [8192])
    wanted = last_tokens(lengths, 8192)
    final = narrowed(without_unread(pack(lengths, 8192), wanted), wanted).final
    assert sum(s.rows * s.k_width for s in final.segments) <= 1.6 * int(lengths.sum())
