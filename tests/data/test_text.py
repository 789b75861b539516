"""Continued pre-training: rows of documents, and their loss against transformers in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from aligner.config.resolve import compose
from aligner.config.sections.data import DataConfig
from aligner.data.collate import collate_sft
from aligner.data.formats import text_rows
from aligner.data.items import SftItem
from aligner.data.text import TextDataset
from aligner.errors import DataError
from aligner.tools.evaluate import evaluate
from tests import stages

TEXTS = ["abcdefghij", "k", "", "lmnop", "q" * 23, "rs"]


def make(tokenizer, width, texts=TEXTS, **more):
    data = DataConfig(format="text", max_tokens=width, **more)
    return TextDataset(text_rows([{"text": text} for text in texts], data), tokenizer, data)


@pytest.mark.parametrize("width", [2, 5, 8, 64])
@pytest.mark.parametrize("across", [False, True])
def test_rows_against_a_loop(byte, width, across):
    stream, number = [], []
    for k, text in enumerate(text for text in TEXTS if text):
        tokens = [*byte(text, add_special_tokens=False)["input_ids"], byte.eos_token_id]
        stream += tokens
        number += [k] * len(tokens)
    data = make(byte, width, across_documents=across)
    rows = [list(range(i, min(i + width, len(stream)))) for i in range(0, len(stream), width)]
    rows = [row for row in rows if len(row) > 1]
    assert len(data) == len(rows) and data.lengths.tolist() == [len(row) for row in rows]
    for item, row in zip(data, rows, strict=True):
        assert item.tokens.tolist() == [stream[i] for i in row]
        first = [n == 0 or (not across and number[i] != number[i - 1]) for n, i in enumerate(row)]
        assert item.loss_mask.tolist() == [int(not f) for f in first]
        assert (item.documents is None) == across


def test_the_report_counts_rows_and_tokens(byte):
    assert str(make(byte, 8).report) == (
        "data.train: 6 rows, 5 kept; 46 tokens an epoch, in 6 rows of data.max_tokens=8; 1 empty documents left out"
    )


def test_bos_and_eos_stand_once(with_bos):
    tokens = make(with_bos, 64, ["a", "b"])[0].tokens.tolist()
    bos, eos = with_bos.bos_token_id, with_bos.eos_token_id
    assert [t for t in tokens if t in (bos, eos)] == [bos, eos, bos, eos] and tokens[0] == bos and tokens[-1] == eos


def test_rows_without_text_are_refused(byte):
    with pytest.raises(DataError, match=r"row 2: text='7': expected a string"):
        make(byte, 8, ["a", 7])
    with pytest.raises(DataError, match=r"expected documents with text, found 2 empty documents"):
        make(byte, 8, ["", ""])
    with pytest.raises(DataError, match=r"row 1: expected the columns \{text\}, found prompt"):
        text_rows([{"prompt": "a"}], DataConfig(format="text"))


def test_rows_of_one_document_beside_rows_of_several(byte):
    several, one = make(byte, 20)[0], SftItem(torch.arange(5).numpy(), torch.ones(5).byte().numpy())
    batch = collate_sft([one, several], 0)
    assert batch.documents.shape == batch.tokens.shape and batch.documents[0].unique().tolist() == [0]
    assert collate_sft([one], 0).documents is None


def expected_loss(folder, data):
    """Mean over all documents' stretches of all rows, each alone in the model; every epoch has all rows."""
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64)
    total, count = 0.0, 0
    for item in data:
        numbers = torch.zeros(len(item.tokens)) if item.documents is None else torch.tensor(item.documents)
        for number in numbers.unique():
            tokens = torch.tensor(item.tokens)[numbers == number].long()
            if len(tokens) > 1:
                with torch.no_grad():
                    logits = model(tokens[None]).logits[0, :-1]
                total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
                count += len(tokens) - 1
    return total / count


@pytest.fixture(scope="module")
def corpus(tiny_data, tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    texts = [f"say {c}: {c}" + c * (7 * i % 11) for i, c in enumerate(stages.LETTERS[:12])]
    stages.write_jsonl(root / "train.jsonl", [{"text": text} for text in texts])
    start = stages.stage("sft", tiny_data, root / "start", "run.steps=1")
    return root, texts, start


@pytest.mark.parametrize(
    "overrides", [[], ["batch.packing=false", "batch.micro_batch_samples=3"], ["data.across_documents=true"]]
)
def test_the_loss_is_that_of_transformers(tiny_data, byte, corpus, tmp_path, overrides):
    root, texts, start = corpus
    data = make(byte, 32, texts, across_documents="data.across_documents=true" in overrides)
    count = len(data) // 3 * 3
    assert count == len(data)
    path = root / "train.jsonl"
    own = [f"data.train={path}", f"data.eval={path}", "data.format=text", f"model.init={start}", "run.steps=1"]
    own += ["run.eval_every=1", f"batch.sequences={count}", "batch.micro_batch_samples=1", "optim.lr=1e-12", *overrides]
    run = stages.stage("sft", tiny_data, tmp_path / "run", *own)
    record = {name: value for records in stages.records(run) for name, value in records.items()}
    wanted = expected_loss(start, data)
    assert record["sft/loss"] == pytest.approx(wanted, rel=1e-5)
    assert record["eval/loss"] == pytest.approx(wanted, rel=1e-5)


def test_text_beside_answers_and_what_eval_says_of_it(tiny_data, byte, corpus, tmp_path):
    """A batch of both kinds; and `aligner eval`, whose mean over rows is that over documents."""
    root, texts, start = corpus
    text = f"{{path: {root / 'train.jsonl'}, format: text}}"
    answers = f"{{path: {tiny_data / 'train.jsonl'}, name: answers}}"
    both = [f"data.sources=[{text}, {answers}]", "data.train=''", f"model.init={start}", "run.steps=1"]
    run = stages.stage("sft", tiny_data, tmp_path / "run", *both)
    (record,) = stages.records(run)
    assert record["data/train/epoch"] > 0 and record["data/answers/epoch"] > 0
    cfg = compose(stages.overrides("sft", tiny_data, start, f"data.eval={root / 'train.jsonl'}", "data.format=text"))
    evaluation = evaluate(cfg)
    assert evaluation["eval/loss"] == pytest.approx(expected_loss(start, make(byte, 32, texts)), rel=1e-5)
