import tracemalloc
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from aligner.config.sections.data import DataConfig
from aligner.data import ragged, row_reader
from aligner.data.dataset import PairDataset, PreferenceDataset, PromptDataset, ScoredDataset, SftDataset
from aligner.data.formats import PreferenceRow, PromptRow, ScoredRow, SftRow, prompt_rows
from aligner.data.templates import encode_sft
from aligner.errors import DataError


def sft(*lengths):
    return [SftRow(prompt="p" * (n - 3), completion="ab", where=f"row {i}") for i, n in enumerate(lengths)]


def test_items_equal_the_tokenization_and_chunks_change_nothing(byte, monkeypatch):
    rows = sft(5, 9, 4, 30, 7)
    whole = SftDataset(rows, byte, DataConfig())
    monkeypatch.setattr(row_reader, "CHUNK", 2)
    monkeypatch.setattr(ragged, "CHUNK", 2)
    chunked = SftDataset(rows, byte, DataConfig())
    for i, (tokens, mask) in enumerate(encode_sft(byte, rows)):
        for data in (whole, chunked):
            assert data[i].tokens.tolist() == tokens and data[i].loss_mask.tolist() == mask
    assert whole.lengths.tolist() == chunked.lengths.tolist() == [5, 9, 4, 30, 7]
    assert whole[0].tokens.base is not None  # a view into flat storage, not a list per row


def test_tokens_beyond_a_limit_lie_in_a_file_and_are_the_same(byte, monkeypatch):
    rows = sft(*range(4, 60))
    held = list(SftDataset(rows, byte, DataConfig()))
    monkeypatch.setattr(ragged, "CHUNK", 8)
    monkeypatch.setattr(ragged, "IN_MEMORY", 500)
    mapped = SftDataset(rows, byte, DataConfig())
    assert isinstance(mapped[0].tokens, np.memmap) and not isinstance(held[0].tokens, np.memmap)
    assert len(mapped) == 56 and mapped.lengths.tolist() == [len(item.tokens) for item in held]
    for one, other in zip(held, mapped, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.loss_mask.tolist() == other.loss_mask.tolist()


def test_prompts_beyond_a_limit_lie_in_a_file_and_are_the_same(byte, monkeypatch):
    """Not a bit of them is held as objects, whatever kinds of values their rows have."""
    chat = [{"role": "user", "content": "question"}]
    values = {
        "day": date(2026, 1, 2),
        "raw": b"\x00\xff",
        "n": Decimal("1.10"),
        "deep": [{"a": None}],
        "text": "x" * 9999,
    }
    rows = [PromptRow(chat if i % 3 else f"question {i}", values | {"i": i}, f"f, row {i + 1}") for i in range(200)]
    held = PromptDataset(rows, byte, DataConfig())
    assert [prompt.fields["i"] for prompt in held] == list(range(200)) and held[0].fields == values | {"i": 0}
    assert (
        held[1].messages == tuple(chat) and held[1].text == "<|user|>question<|assistant|>" and held[0].messages is None
    )
    monkeypatch.setattr(ragged, "CHUNK", 8)
    monkeypatch.setattr(ragged, "IN_MEMORY", 500)
    tracemalloc.start()
    try:
        mapped = PromptDataset(rows, byte, DataConfig())
        assert list(mapped) == list(held) and [mapped.where(i) for i in (0, 199)] == ["f, row 1", "f, row 200"]
        memory, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory < 300_000, memory  # of 2 MB of text
    assert mapped.lengths.tolist() == held.lengths.tolist() == [len(prompt.tokens) for prompt in held]


def test_sft_drop_and_truncate_are_counted(byte):
    rows = [*sft(10, 11, 12), SftRow(prompt="p" * 40, completion="a")]
    dropped = SftDataset(rows, byte, DataConfig(max_tokens=10))
    report = dropped.report
    assert (report.rows, report.kept, report.dropped, report.truncated) == (4, 1, 3, 0)
    assert len(dropped) == 1
    cut = SftDataset(rows, byte, DataConfig(max_tokens=10, overlong="truncate"))
    # the last row's answer is cut away entirely: nothing to learn from it
    assert (cut.report.kept, cut.report.dropped, cut.report.truncated) == (3, 1, 2)
    assert cut.lengths.tolist() == [10, 10, 10]
    assert str(cut.report) == "data.train: 4 rows, 3 kept, 1 dropped and 2 truncated by data.max_tokens=10"


def test_everything_overlong_is_an_error(byte):
    with pytest.raises(DataError, match=r"data.eval: .*data.max_tokens=5.*all 2 rows.*shortest has 8.*data.overlong"):
        SftDataset(sft(8, 9), byte, DataConfig(max_tokens=5), key="data.eval")
    with pytest.raises(DataError, match=r"data.max_prompt_tokens=2"):
        PromptDataset([PromptRow("long")], byte, DataConfig(max_prompt_tokens=2))
    with pytest.raises(DataError, match=r"data.max_tokens=2"):
        PreferenceDataset([PreferenceRow("p", "aa", "b")], byte, DataConfig(max_tokens=2))


@pytest.mark.parametrize("kind", [SftDataset, PreferenceDataset, PairDataset, ScoredDataset, PromptDataset])
def test_no_rows_is_an_error(byte, kind):
    with pytest.raises(DataError, match=r"empty"):
        kind([], byte, DataConfig())


def test_preference_pairs_keep_margins_and_drop_long_ones(byte):
    rows = [
        PreferenceRow("ab", "good", "bad", margin=1.5),
        PreferenceRow("ab", "x" * 20, "short"),
        PreferenceRow("p" * 20, "1", "2"),
    ]
    data = PreferenceDataset(rows[:1], byte, DataConfig())
    assert byte.decode(data[0].chosen) == "abgood<eos>" and byte.decode(data[0].rejected) == "abbad<eos>"
    assert data[0].margin == 1.5 and data[0].lengths == (7, 6) and data.lengths.tolist() == [13]
    dropped = PreferenceDataset(rows, byte, DataConfig(max_tokens=10))
    assert (len(dropped), dropped.report.dropped) == (1, 2)
    # truncated, the third pair has no difference left
    cut = PreferenceDataset(rows, byte, DataConfig(max_tokens=10, overlong="truncate"))
    assert (cut.report.kept, cut.report.dropped, cut.report.truncated) == (2, 1, 1)
    assert byte.decode(cut[1].chosen) == "ab" + "x" * 8 and cut[1].margin == 0.0


def pair(chosen="good", rejected="bad", prompt="ab", where="f, row 3", **more):
    return PreferenceRow(prompt, chosen, rejected, where=where, **more)


def test_pairs_are_two_rows_as_sft_has_them(byte, chatml):
    user, tail = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "no"}]
    talk = pair([{"role": "assistant", "content": "yes, \nwell"}], tail, user)
    rows = [pair(margin=1.5, numbers={"chosen_reward": 2.0, "rejected_reward": -1.0, "weight": 0.5}), pair(prompt="c ")]
    for tokenizer, some in ((byte, rows), (chatml, [*rows, talk])):
        data = PairDataset(some, tokenizer, DataConfig())
        for i, row in enumerate(some):
            for name in ("chosen", "rejected"):
                [(tokens, mask)] = encode_sft(tokenizer, [SftRow(prompt=row.prompt, completion=getattr(row, name))])
                item = getattr(data[i], name)
                assert item.tokens.tolist() == tokens and item.loss_mask.tolist() == mask
                assert tokens.count(tokenizer.eos_token_id) - tokens[: mask.index(1)].count(tokenizer.eos_token_id) == 1
        assert data[0][2:6] == (1.5, 2.0, -1.0, 0.5) and data[1][2:6] == (0.0, 0.0, 0.0, 1.0)
        assert data.lengths.tolist() == [sum(data[i].lengths) for i in range(len(some))]


def test_equal_answers_stay_and_overlong_pairs_go(byte):
    rows = [pair("same", "same"), pair("x" * 20), pair("ab" * 9, "ab" * 8), pair()]
    data = PairDataset(rows, byte, DataConfig(max_tokens=12))
    assert (data.report.kept, data.report.dropped) == (2, 2)
    assert "1 pairs have equal answers: they have no gradient" in str(data.report)
    cut = PairDataset(rows, byte, DataConfig(max_tokens=12, overlong="truncate"))
    assert (cut.report.kept, cut.report.dropped, cut.report.truncated) == (3, 1, 1)  # the third differs past its cut
    assert cut[1].chosen.tokens.tolist() == byte("ab" + "x" * 10)["input_ids"]


def test_the_digest_is_of_tokens_and_of_what_is_learned(byte, chatml):
    """What stored logprobs belong to: another tokenizer, limit, answer or beginning of it makes them useless."""

    def digest(*rows, tokenizer=byte, **data):
        return PairDataset(rows, tokenizer, DataConfig(**data)).digest()

    own = digest(pair("bc", "d", "a"), pair())
    assert own == digest(pair("bc", "d", "a"), pair())
    others = [
        digest(pair("bc", "d", "a"), pair(), tokenizer=chatml),
        digest(pair("bc", "d", "a"), pair(), max_tokens=3, overlong="truncate"),
        digest(pair("bc", "e", "a"), pair()),
        digest(pair(), pair("bc", "d", "a")),
    ]
    assert len({own, *others}) == 5
    assert digest(pair("bcd", "bce", "a")) != digest(pair("cd", "ce", "ab"))  # the same tokens


def test_pairs_with_an_empty_answer_go_where_the_config_says_so(byte):
    rows = [pair(), pair(rejected=" "), pair("", "x"), pair("good")]
    data = PairDataset(rows, byte, DataConfig(empty_answers="drop"))
    assert [byte.decode(data[i].chosen.tokens[data[i].chosen.start : -1]) for i in (0, 1)] == [rows[0].chosen, "good"]
    assert str(data.report) == (
        "data.train: 4 rows, 2 kept, 2 dropped whose answer has no text (data.empty_answers=drop)"
    )
    with pytest.raises(DataError, match="expected answers with some text, found none in 2 rows"):
        PairDataset(rows[1:3], byte, DataConfig(empty_answers="drop"))


@pytest.mark.parametrize(
    "row, text",
    [
        (pair(rejected=""), "f, row 3: expected an answer with some text in `rejected`, found ''"),
        (pair(" \n"), "f, row 3: expected an answer with some text in `chosen`"),
        (pair([{"role": "assistant", "content": ""}], prompt=[{"role": "user", "content": "a"}]), "in `chosen`"),
        (
            pair(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}],
                [{"role": "user", "content": "b"}, {"role": "assistant", "content": "x"}],
                [],
            ),
            "f, row 3: expected `chosen` and `rejected` to answer the same prompt",
        ),
        (pair("good", "bad", ""), "to answer the same prompt"),
    ],
)
def test_pairs_that_nobody_can_compare(chatml, row, text):
    with pytest.raises(DataError) as caught:
        PairDataset([pair(), row], chatml, DataConfig())
    assert text in str(caught.value)


def test_scored_rows_keep_scores_and_drop_long_ones(byte):
    rows = [ScoredRow("ab", "c", (1.0, 0.5)), ScoredRow("ab", "c" * 30, (0.0, 0.0))]
    data = ScoredDataset(rows, byte, DataConfig(max_tokens=10))
    assert len(data) == 1 and byte.decode(data[0].tokens) == "abc<eos>"
    np.testing.assert_array_equal(data[0].scores, [1.0, 0.5])


def test_prompts_keep_row_numbers_fields_and_tail(byte):
    rows = prompt_rows([{"prompt": "p" * 9, "answer": 1}, {"prompt": "abcd", "answer": 2}], DataConfig())
    data = PromptDataset(rows, byte, DataConfig(max_prompt_tokens=5))
    assert len(data) == 1
    assert (data[0].id, data[0].text, data[0].fields) == (1, "abcd", {"answer": 2})
    cut = PromptDataset(
        prompt_rows([{"prompt": "question tail"}], DataConfig()),
        byte,
        DataConfig(max_prompt_tokens=4, overlong="truncate"),
    )
    assert cut[0].text == "tail" and byte.decode(list(cut[0].tokens)) == "tail" and cut.report.truncated == 1


def test_a_prompt_that_is_cut_keeps_its_head(with_bos, chatml):
    """Of a text BOS; a conversation, which has its template's head, is dropped and counted."""
    data = DataConfig(max_prompt_tokens=4, overlong="truncate")
    bos = with_bos.bos_token_id
    for text in ("zzzzzzzz", "zz"):
        whole = with_bos(text)["input_ids"]
        (read,) = PromptDataset(prompt_rows([{"prompt": text}], data), with_bos, data)
        assert list(read.tokens) == ([bos, *whole[-3:]] if len(whole) > 4 else whole) and whole[0] == bos
    chats = [[{"role": "user", "content": text}] for text in ("z", "z" * 40)]
    rows = prompt_rows([{"prompt": chat} for chat in chats], data)
    read = PromptDataset(rows, chatml, DataConfig(max_prompt_tokens=30, overlong="truncate"))
    assert [prompt.id for prompt in read] == [0] and (read.report.dropped, read.report.truncated) == (1, 0)
    assert "conversations are dropped, not truncated" in str(read.report)
    with pytest.raises(DataError, match=r"Raise data\.max_prompt_tokens$"):
        PromptDataset(rows[1:], chatml, DataConfig(max_prompt_tokens=30, overlong="truncate"))


def test_equal_pairs_of_a_reward_model_are_counted(byte):
    data = PreferenceDataset([PreferenceRow("p", "a", "a"), PreferenceRow("p", "a", "b")], byte, DataConfig())
    assert "1 pairs have equal answers: they have no gradient" in str(data.report) and len(data) == 2


def test_a_column_that_only_other_prompts_have_is_none(byte):
    rows = prompt_rows([{"prompt": "p", "answer": 4}, {"prompt": "q", "tests": ["t"]}], DataConfig())
    dataset = PromptDataset(rows, byte, DataConfig())
    assert [prompt.fields for prompt in dataset] == [{"answer": 4, "tests": None}, {"answer": None, "tests": ["t"]}]


def test_chat_prompt_is_what_the_template_opens(byte):
    chat = [{"role": "user", "content": "q"}]
    data = PromptDataset(prompt_rows([{"prompt": chat}], DataConfig()), byte, DataConfig())
    assert data[0].text == byte.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert data.lengths.tolist() == [3]


def test_empty_prompt_is_refused(byte):
    with pytest.raises(DataError, match=r"at least one token"):
        PromptDataset([PromptRow("", where="row 1")], byte, DataConfig())
