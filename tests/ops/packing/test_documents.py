import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.ops.packing.documents import join_documents, observed, split_documents
from aligner.types import TrainBatch

ROWS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=5)  # lengths of documents


@given(rows=ROWS)
def test_split_documents_are_those_of_a_loop_and_join_back(rows):
    width, number = max(map(sum, rows)) + 1, 1
    tokens, documents = torch.full((len(rows), width), 99), torch.zeros(len(rows), width, dtype=torch.int64)
    pieces = []
    for i, sizes in enumerate(rows):
        start = 0
        for k, size in enumerate(sizes):
            tokens[i, start : start + size] = torch.arange(number, number + size)
            documents[i, start : start + size] = k + 7  # only changes count
            pieces.append(list(range(number, number + size)))
            start, number = start + size, number + size
    lengths = torch.tensor([sum(sizes) for sizes in rows])
    batch = TrainBatch(tokens, lengths, (tokens % 2).float(), wanted=tokens % 3 == 0, documents=documents)
    split = split_documents(batch)
    assert [row[:n].tolist() for row, n in zip(split.tokens, split.lengths, strict=True)] == pieces
    for row, mask, wanted, n in zip(split.tokens, split.loss_mask, split.wanted, split.lengths, strict=True):
        assert mask[:n].tolist() == [t % 2 for t in row[:n].tolist()] and not mask[n:].any()
        assert wanted[:n].tolist() == [t % 3 == 0 for t in row[:n].tolist()] and not wanted[n:].any()
    assert split.documents is None and split_documents(split) is split
    back = join_documents(split.tokens, batch)
    real = torch.arange(width) < lengths[:, None]
    assert torch.equal(back[real], tokens[real]) and not back[~real].any()


@given(
    rows=st.lists(st.lists(st.tuples(st.integers(0, 3), st.text("rt", max_size=6)), min_size=1, max_size=3), min_size=1)
)
def test_what_a_policy_observed_is_between_and_behind_its_responses(rows):
    """Of segments (tokens of the prompt, then r: of a response, t: of a tool); against a loop."""
    made, forks, expected = [], [], []
    for segments in rows:
        made.append([])
        forks.append([])
        expected.append([])
        for number, (prompt, rest) in enumerate(segments):
            answered = False
            for kind in "p" * prompt + rest:
                answered |= kind == "r"
                made[-1].append(kind == "r")
                forks[-1].append(number)
                expected[-1].append(answered and kind != "r")
    lengths = [max(1, len(row)) for row in made]
    width = max(lengths) + 2
    made, forks, expected = (
        torch.tensor([row + [0] * (width - len(row)) for row in each]) for each in (made, forks, expected)
    )
    assert torch.equal(observed(made.float(), torch.tensor(lengths), forks), expected.float())
    if not forks.any():
        assert torch.equal(observed(made.float(), torch.tensor(lengths), None), expected.float())
