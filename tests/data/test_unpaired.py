"""Answers with labels: their rows, tokens, mismatched answers and batches."""

import numpy as np
import pytest
import torch

from aligner.config.sections.data import DataConfig
from aligner.data.batches import BatchSource
from aligner.data.collate import collate_unpaired
from aligner.data.formats import SftRow, UnpairedRow, unpaired_rows
from aligner.data.stream import IndexStream
from aligner.data.templates import encode_sft
from aligner.data.unpaired import UnpairedDataset, with_mismatched
from aligner.errors import DataError
from aligner.types import LabelTargets

ROW = {"prompt": "p", "completion": "yes", "label": True}


def dataset(byte, *texts, **data):
    rows = [UnpairedRow(p, (("completion", a, i % 2 == 0),), f"row {i}") for i, (p, a) in enumerate(texts)]
    return UnpairedDataset(rows, byte, DataConfig(**data))


def test_rows_of_labels_pairs_and_the_other_formats():
    def read(*rows, **data):
        return [
            (row.prompt, x, label) for row in unpaired_rows(rows, DataConfig(**data)) for _, x, label in row.answers
        ]

    assert read(ROW, {**ROW, "label": False}) == [("p", "yes", True), ("p", "yes", False)]
    assert read({"prompt": "p", "chosen": "a", "rejected": "b"}) == [("p", "a", True), ("p", "b", False)]
    user, answer = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    assert read({"instruction": "q", "output": "a", "kto_tag": False}) == [(user, answer, False)]
    other = [{"role": "assistant", "content": "b"}]
    pair = {"instruction": "q", "chosen": "a", "rejected": "b"}
    assert read(pair) == [(user, answer, True), (user, other, False)]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read({"conversations": turns, "kto_tag": True}) == [(user, answer, True)]
    assert read({"prompt": "p", "completion": "a", "liked": True}, columns={"label": "liked"}) == [("p", "a", True)]


@pytest.mark.parametrize("label", [1, 0, "true", "", 1.0, [True]])
def test_labels_are_booleans(label):
    with pytest.raises(DataError, match=r"row 2: label=.*expected true or false"):
        list(unpaired_rows([ROW, {**ROW, "label": label}], DataConfig()))


def test_a_row_without_a_label_is_refused():
    with pytest.raises(DataError, match=r"row 2: expected the columns {prompt, completion, label}.*missing: label"):
        list(unpaired_rows([ROW, {**ROW, "label": None}], DataConfig()))
    with pytest.raises(DataError, match=r"{prompt, completion, label} or {chosen, rejected}"):
        unpaired_rows([{"prompt": "p", "completion": "a"}], DataConfig())


def test_tokens_and_masks_are_those_of_sft(byte):
    texts = [("p", "yes"), ("pp", "no"), ("ppp", "maybe later")]
    data = dataset(byte, *texts, max_tokens=8)
    expected = encode_sft(byte, [SftRow(prompt=p, completion=a) for p, a in texts[:2]])
    assert [(d.answer.tokens.tolist(), d.answer.loss_mask.tolist()) for d in data] == expected
    assert data.desirable.tolist() == [True, False] and data.lengths.tolist() == [5, 5]
    assert str(data.report) == "data.train: 3 rows, 2 kept, 1 dropped and 0 truncated by data.max_tokens=8"
    cut = dataset(byte, *texts, max_tokens=8, overlong="truncate")
    assert len(cut) == 3 and cut[2].answer.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert data[0].prompt.tolist() == data[0].answer.tokens[:1].tolist()


def test_an_answer_without_text_is_refused(byte):
    with pytest.raises(DataError, match="row 1: expected an answer with some text in `completion`, found ' '"):
        dataset(byte, ("p", "a"), ("p", " "))
    left = dataset(byte, ("p", "a"), ("p", " "), ("q", "c"), empty_answers="drop")
    assert len(left) == 2 and left.desirable.tolist() == [True, True] and left.report.empty == 1


def items(byte):
    return list(dataset(byte, ("a", "1"), ("a", "22"), ("b", "333"), ("cc", "4"), ("cc", "5"), ("a", "66")))


def test_a_mismatched_answer_stands_behind_the_samples_own_prompt(byte):
    own = items(byte)
    actual = with_mismatched(own, range(6), limit=32)
    for i, j in enumerate([4, 4, 1, 2, 2, 4]):
        prompt, answer = own[i].prompt, own[j].answer.tokens[len(own[j].prompt) :]
        other = actual[i].mismatched
        assert other.tokens.tolist() == [*prompt, *answer]
        assert other.loss_mask.tolist() == [0] * len(prompt) + [1] * len(answer)
    cut = with_mismatched(own, [3], limit=4)[0].mismatched
    assert cut.tokens.tolist() == actual[3].mismatched.tokens[:4].tolist() and len(actual[3].mismatched.tokens) > 4
    alone = with_mismatched([own[0], own[1]], range(2), limit=32)
    assert [item.mismatched for item in alone] == [None, None]


def test_a_batch_has_the_mismatched_answers_between_its_rows(byte):
    results = [item._replace(reference=np.full(len(item.answer.tokens), 0.5)) for item in items(byte)]
    batch = collate_unpaired(with_mismatched(results, range(6), limit=32), 0)
    assert batch.of(LabelTargets).labels.tolist() == [[float(i % 2 == 0), k] for i in range(6) for k in (0.0, 1.0)]
    assert torch.equal(batch.of(LabelTargets).ref_logprobs[0::2].sum(1), 0.5 * batch.lengths[0::2])
    assert batch.of(LabelTargets).ref_logprobs[1::2].abs().sum() == 0
    plain = collate_unpaired(items(byte), 0)
    assert len(plain.tokens) == 6 and plain.of(LabelTargets).ref_logprobs is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_mismatched_answers_of_the_whole_batch(byte, ranks):
    """Whoever gets a sample gets the same mismatched answer with it."""
    data = dataset(byte, *((p, str(i) * (1 + i % 4)) for i, p in enumerate("abbcdaacbddc")))

    def rows(rank, ranks):
        stream = IndexStream(len(data), 0, True, 6)
        arrange = lambda items, own: with_mismatched(items, own, 32)  # noqa: E731
        batch = BatchSource(data, stream, collate_unpaired, 0, rank, ranks, lambda n: n.double(), arrange).next()
        texts = [tuple(tokens[:n].tolist()) for tokens, n in zip(batch.tokens, batch.lengths, strict=True)]
        return list(zip(texts[0::2], texts[1::2], strict=True))

    parts = [rows(rank, ranks) for rank in range(ranks)]
    assert sorted(pair for piece in parts for pair in piece) == sorted(rows(0, 1)) and {
        len(piece) for piece in parts
    } == {6 // ranks}
