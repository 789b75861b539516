"""The stream of a micro-batch: every token once, over all context ranks; attention that sees rows and nothing else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops.packing.pack import Segment, pack, shared_beginnings

cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 70), min_size=1, max_size=9),
        "extra": st.integers(0, 3),
        "context": st.sampled_from([1, 2, 3, 4]),
        "multiple": st.sampled_from([1, 2, 3, 4, 64]),
        "padded": st.booleans(),
        "over_heads": st.booleans(),
    }
)


def ranks(case):
    lengths = torch.tensor(case["lengths"])
    width = max(case["lengths"]) + case["extra"]
    options = {name: case[name] for name in ("context", "multiple", "padded", "over_heads")}
    return lengths, width, [pack(lengths, width, rank=r, **options) for r in range(case["context"])]


@settings(deadline=None)
@given(cases)
def test_every_token_is_on_one_rank_and_finds_its_way_back(case):
    lengths, width, packings = ranks(case)
    tokens = torch.arange(len(lengths) * width).view(len(lengths), width) + 1
    real = torch.arange(width)[None] < lengths[:, None]
    assert len({p.tokens for p in packings}) == 1 and packings[0].tokens % case["multiple"] == 0
    back = sum(p.to_rows(tokens.view(-1)[p.source], shift=False) for p in packings)
    assert torch.equal(back, tokens * real)
    # what is computed at a token is filed under the token it predicts, which is its target
    reported = sum(p.predictions(tokens.view(-1)[p.targets]) for p in packings)
    real[:, 0] = False
    assert torch.equal(reported, tokens * real)
    for p in packings:
        cells = (p.here < p.tokens).nonzero().flatten()
        assert torch.equal(p.positions[p.here[cells]], cells % width)
        assert torch.equal(
            p.before.view(-1, width)[:, 1:] < p.tokens, (p.here.view(-1, width)[:, :-1] < p.tokens) & real[:, 1:]
        )
        if not case["padded"] and case["context"] == 1:
            assert p.tokens < int(lengths.sum()) + case["multiple"]


def test_no_row_is_much_longer_for_the_count_of_all():
    lengths, tokens = torch.tensor([6, 9, 9, 7]), torch.arange(9).expand(4, 9)
    for options in ({}, {"context": 2}, {"padded": True}, {"share": tokens}):
        plain, extra = (pack(lengths, 9, multiple=multiple, **options) for multiple in (1, 63))
        added = extra.lengths - plain.lengths
        assert extra.tokens % 63 == 0 and int(added.sum()) > 20
        assert int(added.max() - added.min()) <= 2 * options.get("context", 0.5)


def seen_by(segment: Segment) -> torch.Tensor:
    """A mask [rows, q_width, k_width]: which key a query of this segment sees."""
    if segment.mask is not None:
        return segment.mask[:, 0]
    square = torch.ones(segment.q_width, segment.k_width, dtype=torch.bool)
    return square.tril(segment.k_width - segment.q_width).expand(segment.rows, -1, -1)


@settings(deadline=None, max_examples=60)
@given(cases)
def test_a_query_sees_its_row_up_to_itself_and_nothing_else(case):
    _, width, packings = ranks(case)
    outside = len(case["lengths"]) * width

    def cell_of(p):
        """The cell of each token of a stream."""
        cells = torch.full((p.tokens,), outside)
        held = (p.here < p.tokens).nonzero().flatten()
        cells[p.here[held]] = held
        return cells

    everywhere = torch.cat([cell_of(p) for p in packings])  # of each key in the streams of all ranks
    for p in packings:
        keys = everywhere if case["context"] > 1 else cell_of(p)
        queries = keys if case["over_heads"] or case["context"] == 1 else cell_of(p)
        index = p.q_index if p.q_index is not None else torch.arange(len(queries))
        out = p.out_index if p.out_index is not None else torch.arange(len(queries))
        assert torch.equal(index[out], torch.arange(len(queries)))
        done = 0
        for segment in p.segments:
            size = segment.rows * segment.q_width
            q_cells = torch.full((size,), outside)
            own = out[(out >= done) & (out < done + size)]
            q_cells[own - done] = queries[index[own]]
            k_index = segment.k_index if segment.k_index is not None else index[done : done + size]
            k_cells = keys[k_index].view(segment.rows, -1)
            for row, sees in enumerate(seen_by(segment)):
                for i, cell in enumerate(q_cells.view(segment.rows, -1)[row].tolist()):
                    if cell < outside:  # nobody reads padding
                        seen = k_cells[row][sees[i]].tolist()
                        assert seen == list(range(cell - cell % width, cell + 1))
            done += size


def test_zigzag_costs_every_rank_the_same():
    packings = [pack(torch.tensor([64, 128]), 128, context=4, rank=r) for r in range(4)]
    seen = [int((p.positions + 1).sum()) for p in packings]  # keys that this rank's queries see
    assert len(set(seen)) == 1


def test_rows_of_one_length_need_no_mask_in_memory():
    packings = [pack(torch.tensor([16384]), 16384, context=2, rank=r) for r in range(2)]
    assert all(segment.mask is None for p in packings for segment in p.segments)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(1, 2), min_size=1, max_size=9)), min_size=2, max_size=9),
    st.sampled_from([1, 2, 3]),
)
def test_rows_that_begin_alike_are_computed_once(rows, multiple):
    """Two prompts of 12 tokens, few different responses: rows are prefixes of each other, equal, or part early."""
    prompts = [[7] * 12, [7] * 6 + [8] * 6]
    texts = [prompts[which] + response for which, response in rows]
    lengths = torch.tensor([len(t) for t in texts])
    width = int(lengths.max())
    tokens = torch.tensor([t + [0] * (width - len(t)) for t in texts])
    p = pack(lengths, width, share=tokens, multiple=multiple)
    assert p.outputs is not None and p.tokens < int(lengths.sum()) and p.tokens % multiple == 0
    stream = tokens.view(-1)[p.source]
    assert torch.equal(p.to_rows(stream, shift=False), tokens)
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0)) * (tokens > 0)
    assert torch.equal(p.to_rows(stream, shift=True), before)
    # predictions: computed at the token before, for this token
    assert torch.equal(p.predictions(stream[p.outputs]), before)
    tokens[:, 0] = 0
    assert torch.equal(p.predictions(tokens.view(-1)[p.targets]), tokens)
    tokens[:, 0] = 7
    # every cell's token sees the row's tokens up to itself: by content and position, as a neighbour's serve as well
    done, seen = 0, {}
    for segment in p.segments:
        q = p.q_index[done : done + segment.rows * segment.q_width].view(segment.rows, -1)
        k = segment.k_index.view(segment.rows, -1)
        for row, sees in enumerate(seen_by(segment)):
            for i, at in enumerate(q[row].tolist()):
                cell = done + row * segment.q_width + i
                if int(p.out_index[at]) == cell:
                    seen[at] = [(int(p.positions[j]), int(stream[j])) for j in k[row][sees[i]].tolist()]
        done += segment.rows * segment.q_width
    for r, text in enumerate(texts):
        for t in range(len(text)):
            at = int(p.here.view(-1, width)[r, t])
            assert seen[at] == list(enumerate(text[: t + 1]))


def test_rows_with_nothing_in_common_are_left_as_they_are():
    tokens = torch.arange(60).view(6, 10)
    assert pack(torch.full((6,), 10), 10, share=tokens).outputs is None


def test_attention_pads_little():
    lengths = torch.randint(16, 2001, (300,), generator=torch.Generator().manual_seed(0))
    padded = sum(segment.rows * segment.q_width**2 for segment in pack(lengths, 2000).segments)
    assert 1 <= padded / int((lengths**2).sum()) < 1.6


def test_rows_share_tokens_as_far_as_their_experts_are_the_same():
    """Of one expert in one layer: the leader's last token has none, whatever stands there."""
    tokens = torch.arange(1, 13).repeat(3, 1)
    lengths = torch.tensor([8, 12, 12])
    routing = torch.zeros(3, 12, 1, 1, dtype=torch.uint8)
    routing[2, 5] = 3
    assert shared_beginnings(tokens, lengths, True)[1].tolist() == [0, 8, 8]
    leader, shared = shared_beginnings(tokens, lengths, True, routing)
    assert leader.tolist() == [0, 0, 0] and shared.tolist() == [0, 7, 5]
